#include "inputs.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>

namespace {

std::string shown(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", value);
    return text;
}

std::string with_unit(const Input &input) { return input.unit == "1" ? "" : " " + input.unit; }

// Lower case, signs replaced by what they mean, single blanks.
std::string plain(std::string text, const Conventions &rules) {
    for (const auto &sign : rules.signs)
        for (std::size_t at = 0; (at = text.find(sign.first, at)) != std::string::npos;) {
            text.replace(at, sign.first.size(), sign.second);
            at += sign.second.size();
        }
    std::string result;
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte == 0xb0 || byte == 0xba)
            result += "deg";  // Latin-1's degree signs: UTF-8's are gone
        else if (std::isspace(byte)) {
            if (!result.empty() && result.back() != ' ') result += ' ';
        } else
            result += static_cast<char>(std::tolower(byte));
    }
    if (!result.empty() && result.back() == ' ') result.pop_back();
    return result;
}

}  // namespace

const Unit &unit_named(const Input &input, const std::string &name) {
    for (const Unit &unit : input.units)
        if (unit.name == name) return unit;
    throw UserError{input.brief + ": the model does not know its unit " + name + "; export it again"};
}

const Unit *unit_spelt(const Input &input, const std::string &said, const Conventions &rules) {
    const std::string text = plain(said, rules);
    if (text.find('|') != std::string::npos) return nullptr;
    for (const Unit &unit : input.units)
        if (("|" + unit.spellings + "|").find("|" + text + "|") != std::string::npos) return &unit;
    return nullptr;
}

std::string accepted(const Input &input) {
    std::string names;
    for (const Unit &unit : input.units) names += (names.empty() ? "" : " or ") + unit.name;
    return names;
}

float converted(double value, const Unit &unit) {
    const float single = static_cast<float>(unit.factor != 1 ? value * unit.factor : value);
    return unit.shift != 0 ? single + static_cast<float>(unit.shift) : single;
}

bool clip(float *value, const Input &input, const Unit &unit, const std::string &name,
          const std::string &where) {
    const auto low = static_cast<float>(input.low), high = static_cast<float>(input.high),
               slack = static_cast<float>(input.slack);
    if (!(*value >= low - slack && *value <= high + slack)) {  // NaN is in no range
        if (std::isnan(*value)) throw UserError{where + ": is not a finite number"};
        throw UserError{where + ": is " + shown(*value) + with_unit(input) + ", outside " +
                        shown(input.low) + " to " + shown(input.high) + "; " + name +
                        " must be in " + unit.name};
    }
    const bool is_outside = *value < low || *value > high;
    *value = std::min(std::max(*value, low), high);
    return is_outside;
}

std::string clipped_text(const Input &input, std::size_t count) {
    if (!count) return "";
    return std::to_string(count) + " values of " + input.brief + " were up to " +
           shown(input.slack) + with_unit(input) + " outside " + shown(input.low) + " to " +
           shown(input.high) + " and are clipped";
}
