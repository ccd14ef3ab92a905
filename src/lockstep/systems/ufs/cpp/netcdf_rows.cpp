#include "rows.h"

#ifdef WITH_NETCDF

#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <climits>
#include <cmath>
#include <cstdlib>

#include "classic.h"
#include "decode.h"
#include "netcdf_api.h"

namespace {

constexpr std::size_t kRowsAtATime = 1 << 16;
constexpr std::size_t kMostRows = 10'000'000;
// The library holds a chunk in memory to read a single value of it.
constexpr std::size_t kMostChunkRows = std::size_t{1} << 24;
constexpr std::size_t kLongestName = 256;  // NC_MAX_NAME

struct NetcdfFile {
    int id = 0;
    explicit NetcdfFile(const std::string &path) {
        struct stat status;
        if (stat(path.c_str(), &status)) throw UserError{path + ": cannot be read"};
        if (!S_ISREG(status.st_mode)) throw UserError{path + ": is no regular file"};
        const std::string damage = damage_of(path);
        if (!damage.empty()) throw damaged(path, damage);
        // The library takes a name that begins like a URL for one.
        char *whole = realpath(path.c_str(), nullptr);
        const int code = nc_open(whole ? whole : path.c_str(), 0, &id);
        std::free(whole);
        if (code) throw damaged(path, nc_strerror(code));
    }
    ~NetcdfFile() { nc_close(id); }
    NetcdfFile(const NetcdfFile &) = delete;
    NetcdfFile &operator=(const NetcdfFile &) = delete;

    static UserError damaged(const std::string &path, const std::string &detail) {
        return UserError{path + ": is not NetCDF, or is truncated or damaged (" + detail +
                         "); get the file again"};
    }
};

// A variable: its dims, how its numbers are stored, and those of one time.
struct Stored {
    int file, id = 0;
    std::string where;
    std::vector<int> dims;
    std::vector<std::size_t> sizes;
    Decoder decoder;

    Stored(int file, int id, const std::string &where)
        : file(file), id(id), where(where), decoder(file, id, where) {
        int count = 0;
        nc_inq_varndims(file, id, &count);
        if (count < 1 || count > 3)
            throw UserError{where + ": has " + std::to_string(count) +
                            " dims; must be 1, or those of a history file"};
        dims.resize(static_cast<std::size_t>(count));
        nc_inq_vardimid(file, id, dims.data());
        for (const int dim : dims) {
            sizes.push_back(0);
            nc_inq_dimlen(file, dim, &sizes.back());
        }
        std::size_t total = 1;
        for (const std::size_t size : sizes) {
            if (size && total > kMostRows / size)
                throw UserError{where + ": has more than " + std::to_string(kMostRows) +
                                " rows, the most that can be read at once"};
            total *= size;
        }
        int storage = 1;
        std::size_t chunks[3] = {0, 0, 0}, chunk = 1;
        if (!nc_inq_var_chunking(file, id, &storage, chunks) && storage == 0) {
            for (int i = 0; i < count; ++i) chunk = std::min(chunk, kMostChunkRows + 1) * chunks[i];
            if (chunk > kMostChunkRows)
                throw UserError{where + ": is stored in chunks of " + std::to_string(chunk) +
                                " values; store it in smaller ones with nccopy -c"};
        }
    }

    bool leads_with_time() const {
        char name[kLongestName + 1] = {};
        if (sizes.size() != 3 || nc_inq_dimname(file, dims[0], name)) return false;
        std::string text = name;
        std::transform(text.begin(), text.end(), text.begin(),
                       [](unsigned char c) { return std::tolower(c); });
        return text == "time";
    }

    // Values `first` to `first + count` of the last dims, which are all but a leading time.
    void read(std::size_t time, std::size_t first, std::size_t count,
              std::vector<double> *values) const {
        std::vector<std::size_t> start(sizes.size(), 0), counts(sizes);
        if (leads_with_time()) {
            start[0] = sizes[0] == 1 ? 0 : time;
            counts[0] = 1;
        }
        if (sizes.size() == 1) {
            start[0] = first;
            counts[0] = count;
        }
        values->resize(count);
        if (const int code = nc_get_vara_double(file, id, start.data(), counts.data(),
                                                values->data()))
            throw UserError{where + ": cannot be read: " + nc_strerror(code)};
    }
};

// A variable that holds one input.
struct Variable : Stored {
    std::string name;
    const Unit *unit;

    Variable(const NetcdfFile &file, const std::string &path, const Input &input,
             const Conventions &rules)
        : Variable(file, path, input, rules, find(file, path, input)) {}

   private:
    using Found = std::pair<std::string, int>;

    Variable(const NetcdfFile &file, const std::string &path, const Input &input,
             const Conventions &rules, const Found &found)
        : Stored(file.id, found.second, path + ": " + found.first), name(found.first),
          unit(&unit_named(input, name == input.cf ? input.cf_unit : input.unit)) {
        bool has_unit = false;
        const std::string said = text_attribute(file.id, id, "units", where, &has_unit);
        if (!has_unit) return;
        unit = unit_spelt(input, said, rules);
        if (!unit)
            throw UserError{where + ": units='" + printable(said.substr(0, 80)) + "': must be " +
                            accepted(input)};
    }

    static Found find(const NetcdfFile &file, const std::string &path, const Input &input) {
        std::vector<Found> found;
        for (const std::string &name : {input.brief, input.cf, input.cice}) {
            int id = 0;
            if (!name.empty() && !nc_inq_varid(file.id, name.c_str(), &id))
                found.emplace_back(name, id);
        }
        const std::string names = input.brief + " (" + input.cf + ")";
        if (found.empty()) throw UserError{path + ": has no variable " + names};
        if (found.size() > 1) throw UserError{path + ": has more than one variable " + names};
        return found[0];
    }
};

// Which cells are rows: those of the ocean that have a place.
std::vector<char> ocean(const NetcdfFile &file, const std::string &path, std::size_t time,
                        const std::vector<std::size_t> &grid, const Conventions &rules) {
    const auto id_of = [&](const std::string &name) {
        int id = 0;
        return nc_inq_varid(file.id, name.c_str(), &id) ? -1 : id;
    };
    const std::size_t cells = grid[0] * grid[1];
    for (const auto &names : rules.masks) {
        if (std::any_of(names.begin(), names.end(), [&](const auto &n) { return id_of(n) < 0; }))
            continue;
        std::vector<char> is_row(cells, 1);
        std::vector<double> values;
        for (std::size_t i = 0; i < names.size(); ++i) {
            const Stored stored(file.id, id_of(names[i]), path + ": " + names[i]);
            // Places of rows and columns are never missing.
            if (i > 0 && stored.sizes.size() == 1) continue;
            const std::size_t lead = stored.leads_with_time();
            if (std::vector<std::size_t>(stored.sizes.begin() + lead, stored.sizes.end()) != grid)
                throw UserError{stored.where + ": is on another grid than the inputs"};
            stored.read(time, 0, cells, &values);
            for (std::size_t cell = 0; cell < cells; ++cell) {
                const double value = stored.decoder.value(values[cell]);
                if (stored.decoder.is_missing(values[cell]) || std::isnan(value) ||
                    (i == 0 && value != 1))
                    is_row[cell] = 0;
            }
        }
        return is_row;
    }
    throw UserError{path + ": has no variables " + rules.masks[0][0] + ", " + rules.masks[0][1] +
                    " and " + rules.masks[0][2] + ", which say where the ocean is"};
}

// Some cells of one time: adds those that are rows. Missing values are refused in files of rows,
// where they cannot be meant; cells of a grid that lack a value are left out.
void read_block(const std::vector<Variable> &variables, const std::vector<Input> &inputs,
                std::size_t time, std::size_t first, std::size_t count, std::int64_t number,
                std::vector<char> is_row, bool is_grid, Rows *rows) {
    const std::size_t width = inputs.size();
    std::vector<float> block(count * width);
    std::vector<std::vector<char>> clipped(width, std::vector<char>(count, 0));
    const std::vector<char> is_ocean = is_row;
    std::vector<double> stored;
    for (std::size_t i = 0; i < width; ++i) {
        const Variable &variable = variables[i];
        variable.read(time, first, count, &stored);
        for (std::size_t cell = 0; cell < count; ++cell) {
            if (!is_ocean[cell]) continue;
            const auto where = [&] {
                return variable.where + " in row " +
                       std::to_string(number + static_cast<std::int64_t>(cell));
            };
            if (variable.decoder.is_missing(stored[cell])) {
                if (!is_grid) throw UserError{where() + ": is missing; leave such rows out"};
                is_row[cell] = 0;
                continue;
            }
            float *value = &block[cell * width + i];
            *value = converted(variable.decoder.value(stored[cell]), *variable.unit);
            // `where` is a text only if it is needed: there are millions of cells.
            if (!(*value > static_cast<float>(inputs[i].low) &&
                  *value < static_cast<float>(inputs[i].high)))
                clipped[i][cell] = clip(value, inputs[i], *variable.unit, variable.name, where());
        }
    }
    for (std::size_t cell = 0; cell < count; ++cell) {
        if (!is_row[cell]) continue;
        rows->values.insert(rows->values.end(), &block[cell * width], &block[cell * width] + width);
        rows->numbers.push_back(number + static_cast<std::int64_t>(cell));
        for (std::size_t i = 0; i < width; ++i) rows->clipped[i] += clipped[i][cell];
    }
}

}  // namespace

Rows read_netcdf(const std::string &path, const std::vector<Input> &inputs,
                 const Conventions &rules) {
    const NetcdfFile file(path);
    std::vector<Variable> variables;
    for (const Input &input : inputs) {
        variables.emplace_back(file, path, input, rules);
        if (variables.back().dims != variables[0].dims)
            throw UserError{variables.back().where + ": has other dims than " +
                            variables[0].name};
    }
    Rows rows;
    rows.clipped.resize(inputs.size());
    const Variable &any = variables.at(0);
    const std::size_t num_dims = any.sizes.size(), lead = any.leads_with_time();
    if (num_dims == 1) {
        for (std::size_t start = 0; start < any.sizes[0]; start += kRowsAtATime) {
            const std::size_t count = std::min(kRowsAtATime, any.sizes[0] - start);
            read_block(variables, inputs, 0, start, count, static_cast<std::int64_t>(start),
                       std::vector<char>(count, 1), false, &rows);
        }
    } else if (num_dims - lead != 2) {
        throw UserError{any.where + ": has 3 dims, and the first one is not time"};
    } else {
        const std::vector<std::size_t> grid(any.sizes.begin() + static_cast<long>(lead),
                                            any.sizes.end());
        const std::size_t cells = grid[0] * grid[1], times = lead ? any.sizes[0] : 1;
        for (std::size_t time = 0; cells && time < times; ++time)
            read_block(variables, inputs, time, 0, cells,
                       static_cast<std::int64_t>(time * cells),
                       ocean(file, path, time, grid, rules), true, &rows);
    }
    if (rows.numbers.empty()) throw UserError{path + ": holds no rows"};
    return rows;
}

#else

Rows read_netcdf(const std::string &path, const std::vector<Input> &, const Conventions &) {
    throw UserError{path + ": this program was built without netCDF; give CSV, or build it again "
                           "with -DNETCDF_LIBRARY=/path/to/libnetcdf.so"};
}

#endif
