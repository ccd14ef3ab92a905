// Rows of inputs in physical units, from a CSV or a NetCDF file.
#pragma once

#include <string>
#include <vector>

struct Names {
    std::vector<std::string> brief;  // short names, in the order of the emulator's inputs
    std::vector<std::string> cf;     // CF names, in the same order
};

// What the user can mend: the message says how.
struct UserError {
    std::string message;
};

// Values row by row, each with as many as there are names. Throws UserError.
//
// CSV: numbers separated by commas. A first line with names (short or CF) says the order of the
// columns; without it, it is that of `names`. NetCDF (.nc): a one-dimensional variable for each
// input, with its short or its CF name.
std::vector<double> read_rows(const std::string &path, const Names &names);
