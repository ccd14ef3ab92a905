// Whether a NetCDF file is whole, by what its own header says.
#pragma once

#include <string>

// Why a file is not NetCDF, or is a classic one (CDF-1, CDF-2, CDF-5) that was cut off; empty if it
// is whole. The netCDF library reads a classic file that was cut off as if zeros or the values of
// other variables followed. NetCDF-4 files are HDF5, which checks that itself.
std::string damage_of(const std::string &path);

// A text from a file for messages: in ASCII and in one line.
std::string printable(std::string text);
