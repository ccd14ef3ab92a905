#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace {

struct Column {
    std::size_t index;
    bool is_cf;
};

std::string trimmed(const std::string &text) {
    const char *blanks = " \t\r";
    const auto first = text.find_first_not_of(blanks);
    if (first == std::string::npos) return "";
    return text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

std::vector<std::string> cells_of(const std::string &line) {
    std::vector<std::string> cells;
    std::stringstream stream(line);
    std::string cell;
    while (std::getline(stream, cell, ',')) cells.push_back(trimmed(cell));
    if (!line.empty() && line.back() == ',') cells.push_back("");
    return cells;
}

bool number(const std::string &text, double *value) {
    char *end = nullptr;
    *value = std::strtod(text.c_str(), &end);
    return !text.empty() && *end == '\0';
}

// Where each input's column is, by the names in the first line.
std::vector<Column> columns_of(const std::string &where, const std::vector<std::string> &header,
                               const std::vector<Input> &inputs) {
    std::vector<Column> columns;
    for (const Input &input : inputs) {
        const auto is_named = [&](const std::string &name) {
            return name == input.brief || name == input.cf;
        };
        const auto column = std::find_if(header.begin(), header.end(), is_named);
        if (column == header.end())
            throw UserError{where + ": has no column " + input.brief + " (" + input.cf + ")"};
        if (std::count_if(header.begin(), header.end(), is_named) > 1)
            throw UserError{where + ": has more than one column " + input.brief + " (" + input.cf +
                            ")"};
        columns.push_back({static_cast<std::size_t>(column - header.begin()),
                           *column != input.brief});
    }
    return columns;
}

std::vector<float> read_csv(const std::string &path, const std::vector<Input> &inputs) {
    std::ifstream file(path);
    if (!file) throw UserError{path + ": cannot be read"};
    std::vector<Column> columns;
    for (std::size_t i = 0; i < inputs.size(); ++i) columns.push_back({i, false});
    std::size_t width = columns.size();
    std::vector<float> rows;
    std::string line;
    bool first = true;
    for (int count = 1; std::getline(file, line); ++count) {
        if (trimmed(line).empty()) continue;
        const std::string where = path + ": line " + std::to_string(count);
        const auto cells = cells_of(line);
        double value = 0;
        if (first && !number(cells[0], &value)) {
            columns = columns_of(where, cells, inputs);
            width = cells.size();
            first = false;
            continue;
        }
        first = false;
        if (cells.size() != width)
            throw UserError{where + ": has " + std::to_string(cells.size()) + " values; must be " +
                            std::to_string(width)};
        for (std::size_t i = 0; i < columns.size(); ++i) {
            const std::string &cell = cells[columns[i].index];
            const std::string &name = columns[i].is_cf ? inputs[i].cf : inputs[i].brief;
            const std::string here = where + ": " + name + "=" + cell;
            if (!number(cell, &value))
                throw UserError{where + ": " + name + "='" + cell + "' is not a number"};
            const float single = converted(value, inputs[i], columns[i].is_cf);
            if (!is_plausible(single, inputs[i]))
                throw implausible(value, inputs[i], columns[i].is_cf, here);
            rows.push_back(single);
        }
    }
    if (rows.empty()) throw UserError{path + ": holds no rows"};
    return rows;
}

std::string shown(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", value);
    return text;
}

}  // namespace

float converted(double value, const Input &input, bool is_cf) {
    const float single = static_cast<float>(value);
    return is_cf && input.cf_shift != 0 ? single + static_cast<float>(input.cf_shift) : single;
}

bool is_plausible(float value, const Input &input) {  // NaN is in no range
    return value >= static_cast<float>(input.low) && value <= static_cast<float>(input.high);
}

UserError implausible(double value, const Input &input, bool is_cf, const std::string &where) {
    if (!std::isfinite(value)) return {where + ": is not a finite number"};
    return {where + ": is " + shown(converted(value, input, is_cf)) + " " + input.unit +
            ", outside " + shown(input.low) + " to " + shown(input.high) + "; " +
            (is_cf ? input.cf + " must be in " + input.cf_unit
                   : input.brief + " must be in " + input.unit)};
}

std::vector<float> read_rows(const std::string &path, const std::vector<Input> &inputs) {
    const bool netcdf = path.size() > 3 && path.compare(path.size() - 3, 3, ".nc") == 0;
    return netcdf ? read_netcdf(path, inputs) : read_csv(path, inputs);
}
