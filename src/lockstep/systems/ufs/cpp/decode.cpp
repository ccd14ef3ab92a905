#include "decode.h"

#ifdef WITH_NETCDF

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <utility>

#include "netcdf_api.h"
#include "inputs.h"

namespace {

constexpr std::size_t kMostNumbers = 1024, kMostText = 4096;

bool is_number(int type) { return type >= kNcByte && type <= kNcUint64 && type != kNcChar; }
bool is_float(int type) { return type == kNcFloat || type == kNcDouble; }

// Whether numpy computes this type with a float32 in float32.
bool is_exact_in_float(int type) {
    return type == kNcByte || type == kNcUbyte || type == kNcShort || type == kNcUshort ||
           type == kNcFloat;
}

struct Limits {
    double low, high, fill;  // the last is what the library writes where nothing was written
};

Limits limits_of(int type) {
    switch (type) {
        case kNcByte: return {-128, 127, -127};
        case kNcUbyte: return {0, 255, 255};
        case kNcShort: return {-32768, 32767, -32767};
        case kNcUshort: return {0, 65535, 65535};
        case kNcInt: return {-2147483648.0, 2147483647, -2147483647};
        case kNcUint: return {0, 4294967295.0, 4294967295.0};
        case kNcInt64: return {-9223372036854775808.0, 9223372036854775807.0,
                               -9223372036854775806.0};
        case kNcUint64: return {0, 18446744073709551615.0, 18446744073709551614.0};
    }
    const double infinity = std::numeric_limits<double>::infinity();
    const double fill = 9.969209968386869e36;
    return {-infinity, infinity, type == kNcFloat ? static_cast<float>(fill) : fill};
}

// 2 to the number of bits of a signed integer type, 0 for others.
double values_of(int type) {
    const Limits limits = limits_of(type);
    return is_number(type) && !is_float(type) && limits.low < 0 ? -2 * limits.low : 0;
}

struct Numbers {
    int type = 0;
    std::vector<double> values;
};

Numbers numbers_of(int file, int variable, const char *name, const std::string &where) {
    Numbers numbers;
    std::size_t length = 0;
    if (nc_inq_att(file, variable, name, &numbers.type, &length)) return numbers;
    if (!is_number(numbers.type) || length == 0 || length > kMostNumbers)
        throw UserError{where + ": " + name + ": must be a number"};
    numbers.values.resize(length);
    if (const int code = nc_get_att_double(file, variable, name, numbers.values.data()))
        throw UserError{where + ": " + name + ": cannot be read: " + nc_strerror(code)};
    return numbers;
}

// An attribute's numbers in the type of the variable; floats are rounded to it. `wrap` is that of
// the variable: those of its own type are unsigned as its values are.
std::vector<double> fitting(int file, int variable, int type, double wrap, const char *name,
                            const std::string &where) {
    const auto numbers = numbers_of(file, variable, name, where);
    auto values = numbers.values;
    Limits limits = limits_of(type);
    if (wrap) limits = {0, wrap - 1, 0};
    for (double &value : values) {
        if (wrap && numbers.type == type && value < 0) value += wrap;
        const bool was_finite = std::isfinite(value);
        if (type == kNcFloat) value = static_cast<float>(value);
        const bool fits = is_float(type) ? std::isfinite(value) || !was_finite
                                         : value == std::trunc(value) && value >= limits.low &&
                                               value <= limits.high;
        if (!fits)
            throw UserError{where + ": " + name +
                            ": is no value that the variable's type has; mend the attribute"};
    }
    return values;
}

double factor(int file, int variable, const char *name, const std::string &where, bool *is_there,
              int *type) {
    const auto numbers = numbers_of(file, variable, name, where);
    *is_there = !numbers.values.empty();
    *type = numbers.type;
    if (!*is_there) return 0;
    if (numbers.values.size() != 1 || !std::isfinite(numbers.values[0]))
        throw UserError{where + ": " + name + ": must be one number, finite and not 0"};
    return numbers.values[0];
}

}  // namespace

Decoder::Decoder(int file, int variable, const std::string &where) {
    int type = 0;
    if (nc_inq_vartype(file, variable, &type) || !is_number(type))
        throw UserError{where + ": is of type " +
                        (type == kNcChar || type == kNcString ? "text" : std::to_string(type)) +
                        "; must be numbers"};
    bool is_unsigned = false;
    std::string said = text_attribute(file, variable, "_Unsigned", where, &is_unsigned);
    std::transform(said.begin(), said.end(), said.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    if (said == "true") wrap_ = values_of(type);

    missing_ = fitting(file, variable, type, wrap_, "missing_value", where);
    auto fill = fitting(file, variable, type, wrap_, "_FillValue", where);
    if (fill.empty() && !wrap_) fill.push_back(limits_of(type).fill);
    missing_.insert(missing_.end(), fill.begin(), fill.end());

    low_ = -std::numeric_limits<double>::infinity();
    high_ = -low_;
    const auto range = fitting(file, variable, type, wrap_, "valid_range", where);
    if (!range.empty()) {
        if (range.size() != 2 || !(range[0] <= range[1]))
            throw UserError{where + ": valid_range: must be two numbers, the lesser first"};
        low_ = range[0];
        high_ = range[1];
    } else {
        for (const auto &limit : {std::pair<const char *, double *>{"valid_min", &low_},
                                  std::pair<const char *, double *>{"valid_max", &high_}}) {
            const auto bound = fitting(file, variable, type, wrap_, limit.first, where);
            if (bound.empty()) continue;
            if (bound.size() != 1 || std::isnan(bound[0]))
                throw UserError{where + ": " + limit.first + ": must be one number"};
            *limit.second = bound[0];
        }
    }

    int scale_type = 0, offset_type = 0;
    scale_ = factor(file, variable, "scale_factor", where, &has_scale_, &scale_type);
    offset_ = factor(file, variable, "add_offset", where, &has_offset_, &offset_type);
    if (has_scale_ && scale_ == 0)
        throw UserError{where + ": scale_factor: must be one number, finite and not 0"};
    scaled_in_float_ = is_exact_in_float(type) && scale_type == kNcFloat;
    const bool is_float_so_far = has_scale_ ? scaled_in_float_ : is_exact_in_float(type);
    shifted_in_float_ = is_float_so_far && offset_type == kNcFloat;
}

double Decoder::as_unsigned(double stored) const { return stored < 0 ? stored + wrap_ : stored; }

bool Decoder::is_missing(double stored) const {
    stored = as_unsigned(stored);
    for (const double value : missing_)
        if (stored == value || (std::isnan(value) && std::isnan(stored))) return true;
    return stored < low_ || stored > high_;
}

double Decoder::value(double stored) const {
    double result = as_unsigned(stored);
    if (has_scale_)
        result = scaled_in_float_ ? static_cast<float>(result) * static_cast<float>(scale_)
                                  : result * scale_;
    if (has_offset_)
        result = shifted_in_float_ ? static_cast<float>(result) + static_cast<float>(offset_)
                                   : result + offset_;
    return result;
}

std::string text_attribute(int file, int variable, const char *name, const std::string &where,
                           bool *is_there) {
    int type = 0;
    std::size_t length = 0;
    *is_there = !nc_inq_att(file, variable, name, &type, &length);
    if (!*is_there) return "";
    const std::string what = where + ": " + name;
    int code = 0;
    std::string content;
    if (type == kNcChar && length <= kMostText) {
        content.resize(length);
        if (length) code = nc_get_att_text(file, variable, name, &content[0]);
    } else if (type == kNcString && length == 1) {
        char *text = nullptr;
        code = nc_get_att_string(file, variable, name, &text);
        if (!code && text) content = text;
        if (!code) nc_free_string(1, &text);
    } else {
        throw UserError{what + ": must be a short text"};
    }
    if (code) throw UserError{what + ": cannot be read: " + nc_strerror(code)};
    return content.substr(0, content.find('\0'));
}

#endif
