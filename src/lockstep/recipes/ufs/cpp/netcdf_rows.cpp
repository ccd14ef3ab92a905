#include "rows.h"

#ifdef WITH_NETCDF

#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <climits>
#include <cstdlib>

#include "classic.h"
#include "decode.h"
#include "netcdf_api.h"

namespace {

constexpr std::size_t kRowsAtATime = 1 << 16;
constexpr std::size_t kMostRows = 10'000'000;
// The library holds a chunk in memory to read a single value of it.
constexpr std::size_t kMostChunkRows = std::size_t{1} << 24;

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

// Whether a `units` attribute is one of the spellings a|b|c, whatever its case.
bool is_spelling(std::string said, const std::string &spellings) {
    const auto is_blank = [](unsigned char c) { return std::isspace(c); };
    said.erase(said.begin(), std::find_if_not(said.begin(), said.end(), is_blank));
    said.erase(std::find_if_not(said.rbegin(), said.rend(), is_blank).base(), said.end());
    std::transform(said.begin(), said.end(), said.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    return said.find('|') == std::string::npos &&
           ("|" + spellings + "|").find("|" + said + "|") != std::string::npos;
}

// A variable that holds one input, one value for each row.
struct Variable {
    bool is_cf = false;  // before `id`, whose initialiser sets it
    int id = 0;
    std::string where;
    std::size_t length = 0;
    Decoder decoder;

    Variable(int file, const std::string &path, const Input &input)
        : id(find(file, path, input, &is_cf)),
          where(path + ": " + (is_cf ? input.cf : input.brief)), decoder(file, id, where) {
        int num_dims = 0, dim = 0;
        nc_inq_varndims(file, id, &num_dims);
        if (num_dims != 1)
            throw UserError{where + ": has " + std::to_string(num_dims) + " dims; must be 1"};
        nc_inq_vardimid(file, id, &dim);
        nc_inq_dimlen(file, dim, &length);
        if (length > kMostRows)
            throw UserError{where + ": has " + std::to_string(length) + " rows; at most " +
                            std::to_string(kMostRows) + " can be read at once"};
        int storage = 1;
        std::size_t chunk = 0;
        if (!nc_inq_var_chunking(file, id, &storage, &chunk) && storage == 0 &&
            chunk > kMostChunkRows)
            throw UserError{where + ": is stored in chunks of " + std::to_string(chunk) +
                            " values; store it in smaller ones with nccopy -c"};
        bool has_unit = false;
        const std::string unit = text_attribute(file, id, "units", where, &has_unit);
        if (has_unit && !is_spelling(unit, is_cf ? input.cf_spellings : input.spellings))
            throw UserError{where + ": units='" + printable(unit.substr(0, 80)) + "': must be " +
                            (is_cf ? input.cf_unit : input.unit)};
    }

    static int find(int file, const std::string &path, const Input &input, bool *is_cf) {
        int brief_id = 0, cf_id = 0;
        const bool brief = !nc_inq_varid(file, input.brief.c_str(), &brief_id);
        const bool cf = !nc_inq_varid(file, input.cf.c_str(), &cf_id);
        const std::string names = input.brief + " (" + input.cf + ")";
        if (!brief && !cf) throw UserError{path + ": has no variable " + names};
        if (brief && cf && brief_id != cf_id)
            throw UserError{path + ": has more than one variable " + names};
        *is_cf = !brief;
        return brief ? brief_id : cf_id;
    }
};

}  // namespace

std::vector<float> read_netcdf(const std::string &path, const std::vector<Input> &inputs) {
    const NetcdfFile file(path);
    const std::size_t width = inputs.size();
    std::vector<Variable> variables;
    for (const Input &input : inputs) {
        variables.emplace_back(file.id, path, input);
        if (variables.back().length != variables[0].length)
            throw UserError{variables.back().where + ": has " +
                            std::to_string(variables.back().length) + " rows; must be " +
                            std::to_string(variables[0].length)};
    }
    const std::size_t length = variables.empty() ? 0 : variables[0].length;
    if (length == 0) throw UserError{path + ": holds no rows"};
    std::vector<float> rows;
    std::vector<double> stored(std::min(length, kRowsAtATime));
    for (std::size_t start = 0; start < length; start += kRowsAtATime) {
        const std::size_t count = std::min(kRowsAtATime, length - start);
        rows.resize((start + count) * width);
        for (std::size_t i = 0; i < width; ++i) {
            const Variable &variable = variables[i];
            if (const int code =
                    nc_get_vara_double(file.id, variable.id, &start, &count, stored.data()))
                throw UserError{variable.where + ": cannot be read: " + nc_strerror(code)};
            for (std::size_t row = 0; row < count; ++row) {
                const auto where = [&] {
                    return variable.where + " in row " + std::to_string(start + row);
                };
                if (variable.decoder.is_missing(stored[row]))
                    throw UserError{where() + ": is missing; leave such rows out"};
                const double value = variable.decoder.value(stored[row]);
                const float single = converted(value, inputs[i], variable.is_cf);
                if (!is_plausible(single, inputs[i]))
                    throw implausible(value, inputs[i], variable.is_cf, where());
                rows[(start + row) * width + i] = single;
            }
        }
    }
    return rows;
}

#else

std::vector<float> read_netcdf(const std::string &path, const std::vector<Input> &) {
    throw UserError{path + ": this program was built without netCDF; give CSV, or build it again "
                           "with -DNETCDF_LIBRARY=/path/to/libnetcdf.so"};
}

#endif
