// Rows of inputs in physical units, from a CSV or a NetCDF file.
#pragma once

#include <string>
#include <vector>

// One input of the emulator. A column has either its short name and its unit, or its CF name and
// the unit that CF files have: temperatures of the air are in °C under the first, in K under the
// second.
struct Input {
    std::string brief;      // short name
    std::string cf;         // CF name
    std::string unit;       // of the emulator
    std::string cf_unit;    // under the CF name
    std::string spellings;  // what a `units` attribute may say for `unit`, in lower case, with |
    std::string cf_spellings;
    double cf_shift = 0;    // added to a value in `cf_unit` to have it in `unit`
    double low = 0, high = 0;  // what is plausible, in `unit`
};

// What the user can mend: the message says how.
struct UserError {
    std::string message;
};

// Values row by row in the emulator's units, each with as many as there are inputs. Throws
// UserError: for what is missing, out of range or in another unit too.
//
// CSV: numbers separated by commas. A first line with names (short or CF) says the order of the
// columns; without it, it is that of `inputs`, with their short names. NetCDF (.nc): a
// one-dimensional variable for each input, with its short or its CF name.
std::vector<float> read_rows(const std::string &path, const std::vector<Input> &inputs);

// The NetCDF part of it.
std::vector<float> read_netcdf(const std::string &path, const std::vector<Input> &inputs);

// A value in the emulator's unit.
float converted(double value, const Input &input, bool is_cf);

// Whether a value in the emulator's unit is finite and in range.
bool is_plausible(float value, const Input &input);

// The error for a value that, converted, is not plausible; `where` it is from.
UserError implausible(double value, const Input &input, bool is_cf, const std::string &where);
