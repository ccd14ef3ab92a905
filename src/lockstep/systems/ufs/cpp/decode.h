// What the numbers of a NetCDF variable stand for: missing values, packing. The same rules as in
// Lockstep's decode.py, so that the program reads what training read.
#pragma once

#include <string>
#include <vector>

class Decoder {
   public:
    // Reads the attributes of a variable. Throws UserError where they do not fit it; `where` names
    // it.
    Decoder(int file, int variable, const std::string &where);

    // Whether a stored number is missing, by missing_value, _FillValue, or the valid range.
    bool is_missing(double stored) const;

    // stored * scale_factor + add_offset, in the precision that numpy would use.
    double value(double stored) const;

   private:
    double as_unsigned(double stored) const;

    std::vector<double> missing_;
    double wrap_ = 0;  // of integers that stand for unsigned ones: how many there are
    double low_, high_;
    bool has_scale_ = false, has_offset_ = false;
    double scale_ = 1, offset_ = 0;
    bool scaled_in_float_ = false, shifted_in_float_ = false;
};

// The text of an attribute, empty if there is none; `is_there` says which. Throws UserError if it is
// no text, or a long one.
std::string text_attribute(int file, int variable, const char *name, const std::string &where,
                           bool *is_there);
