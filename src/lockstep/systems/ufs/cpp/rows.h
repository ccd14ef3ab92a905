// Rows of inputs in physical units, from a CSV or a NetCDF file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "inputs.h"

// Rows in the emulator's units.
struct Rows {
    std::vector<float> values;          // row by row, as many in each as there are inputs
    std::vector<std::int64_t> numbers;  // of each row: its place in the file
    std::vector<std::size_t> clipped;   // for each input, how many values were a little out of range
};

// Throws UserError: for what is missing, out of range or in a unit that is not known too.
//
// CSV: numbers separated by commas. A first line with names (short or CF) says the order of the
// columns; without it, it is that of `inputs`, with their short names. NetCDF (.nc): a
// one-dimensional variable for each input, with its short or its CF name; or a history file, whose
// ocean cells with all values are the rows.
Rows read_rows(const std::string &path, const std::vector<Input> &inputs, const Conventions &rules);

// The NetCDF part of it.
Rows read_netcdf(const std::string &path, const std::vector<Input> &inputs,
                 const Conventions &rules);
