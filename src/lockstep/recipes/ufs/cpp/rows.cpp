#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>

#ifdef WITH_NETCDF
#include "netcdf_api.h"
#endif

namespace {

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
std::vector<std::size_t> columns_of(const std::string &where, const std::vector<std::string> &header,
                                    const Names &names) {
    std::vector<std::size_t> columns;
    for (std::size_t i = 0; i < names.brief.size(); ++i) {
        const auto found = std::find_if(header.begin(), header.end(), [&](const std::string &name) {
            return name == names.brief[i] || name == names.cf[i];
        });
        if (found == header.end())
            throw UserError{where + ": has no column " + names.brief[i] + " (" + names.cf[i] + ")"};
        columns.push_back(found - header.begin());
    }
    return columns;
}

void check_finite(double value, const std::string &where) {
    if (!std::isfinite(value)) throw UserError{where + ": is not a finite number"};
}

std::vector<double> read_csv(const std::string &path, const Names &names) {
    std::ifstream file(path);
    if (!file) throw UserError{path + ": cannot be read"};
    std::vector<std::size_t> columns(names.brief.size());
    for (std::size_t i = 0; i < columns.size(); ++i) columns[i] = i;
    std::size_t width = columns.size();
    std::vector<double> rows;
    std::string line;
    bool first = true;
    for (int count = 1; std::getline(file, line); ++count) {
        if (trimmed(line).empty()) continue;
        const std::string where = path + ": line " + std::to_string(count);
        const auto cells = cells_of(line);
        double value = 0;
        if (first && !number(cells[0], &value)) {
            columns = columns_of(where, cells, names);
            width = cells.size();
            first = false;
            continue;
        }
        first = false;
        if (cells.size() != width)
            throw UserError{where + ": has " + std::to_string(cells.size()) + " values; must be " +
                            std::to_string(width)};
        for (std::size_t i = 0; i < columns.size(); ++i) {
            const std::string &cell = cells[columns[i]];
            if (!number(cell, &value))
                throw UserError{where + ": " + names.brief[i] + "='" + cell + "' is not a number"};
            check_finite(value, where + ": " + names.brief[i] + "=" + cell);
            rows.push_back(value);
        }
    }
    if (rows.empty()) throw UserError{path + ": holds no rows"};
    return rows;
}

#ifdef WITH_NETCDF

struct NetcdfFile {
    int id = 0;
    explicit NetcdfFile(const std::string &path) {
        const int code = nc_open(path.c_str(), 0, &id);
        if (code) throw UserError{path + ": cannot be read: " + nc_strerror(code)};
    }
    ~NetcdfFile() { nc_close(id); }
    NetcdfFile(const NetcdfFile &) = delete;
    NetcdfFile &operator=(const NetcdfFile &) = delete;
};

std::vector<double> read_netcdf(const std::string &path, const Names &names) {
    const NetcdfFile file(path);
    const std::size_t width = names.brief.size();
    std::vector<double> rows;
    for (std::size_t i = 0; i < width; ++i) {
        const std::string where = path + ": " + names.brief[i];
        int variable = 0, num_dims = 0, dim = 0;
        if (nc_inq_varid(file.id, names.brief[i].c_str(), &variable) &&
            nc_inq_varid(file.id, names.cf[i].c_str(), &variable))
            throw UserError{path + ": has no variable " + names.brief[i] + " (" + names.cf[i] + ")"};
        nc_inq_varndims(file.id, variable, &num_dims);
        if (num_dims != 1)
            throw UserError{where + ": has " + std::to_string(num_dims) + " dims; must be 1"};
        std::size_t length = 0;
        nc_inq_vardimid(file.id, variable, &dim);
        nc_inq_dimlen(file.id, dim, &length);
        if (i == 0) rows.resize(length * width);
        if (length * width != rows.size())
            throw UserError{where + ": has " + std::to_string(length) + " rows; must be " +
                            std::to_string(rows.size() / width)};
        std::vector<double> column(length);
        const int code = nc_get_var_double(file.id, variable, column.data());
        if (code) throw UserError{where + ": cannot be read: " + nc_strerror(code)};
        for (std::size_t row = 0; row < length; ++row) {
            check_finite(column[row], where + " in row " + std::to_string(row));
            rows[row * width + i] = column[row];
        }
    }
    if (rows.empty()) throw UserError{path + ": holds no rows"};
    return rows;
}

#else

std::vector<double> read_netcdf(const std::string &path, const Names &) {
    throw UserError{path + ": this program was built without netCDF; give CSV, or build it again "
                           "with -DNETCDF_LIBRARY=/path/to/libnetcdf.so"};
}

#endif

}  // namespace

std::vector<double> read_rows(const std::string &path, const Names &names) {
    const bool netcdf = path.size() > 3 && path.compare(path.size() - 3, 3, ".nc") == 0;
    return netcdf ? read_netcdf(path, names) : read_csv(path, names);
}
