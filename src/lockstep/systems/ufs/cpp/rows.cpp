#include "rows.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace {

struct Column {
    std::size_t index;
    std::string name;
    const Unit *unit;
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
        const std::string &unit = *column == input.brief ? input.unit : input.cf_unit;
        columns.push_back({static_cast<std::size_t>(column - header.begin()), *column,
                           &unit_named(input, unit)});
    }
    return columns;
}

Rows read_csv(const std::string &path, const std::vector<Input> &inputs) {
    std::ifstream file(path);
    if (!file) throw UserError{path + ": cannot be read"};
    std::vector<Column> columns;
    for (std::size_t i = 0; i < inputs.size(); ++i) 
        columns.push_back({i, inputs[i].brief, &unit_named(inputs[i], inputs[i].unit)});
    std::size_t width = columns.size();
    Rows rows;
    rows.clipped.resize(inputs.size());
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
            const std::string &name = columns[i].name;
            if (!number(cell, &value))
                throw UserError{where + ": " + name + "='" + cell + "' is not a number"};
            float single = converted(value, *columns[i].unit);
            rows.clipped[i] +=
                clip(&single, inputs[i], *columns[i].unit, name, where + ": " + name + "=" + cell);
            rows.values.push_back(single);
        }
        rows.numbers.push_back(static_cast<std::int64_t>(rows.numbers.size()));
    }
    if (rows.values.empty()) throw UserError{path + ": holds no rows"};
    return rows;
}

}  // namespace

Rows read_rows(const std::string &path, const std::vector<Input> &inputs,
               const Conventions &rules) {
    const bool netcdf = path.size() > 3 && path.compare(path.size() - 3, 3, ".nc") == 0;
    return netcdf ? read_netcdf(path, inputs, rules) : read_csv(path, inputs);
}
