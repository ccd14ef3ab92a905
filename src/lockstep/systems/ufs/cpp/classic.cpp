#include "classic.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <vector>

namespace {

using Count = std::uint64_t;

constexpr Count kMost = std::numeric_limits<Count>::max() / 4;
constexpr Count kLongestHeader = Count{1} << 24;  // the library keeps all of it in memory
constexpr Count kLongestName = 4096;
constexpr Count kDims = 10, kVariables = 11, kAttributes = 12;
constexpr Count kBytesOfType[] = {0, 1, 1, 2, 4, 4, 8, 1, 2, 4, 8, 8};
const std::string kHdf5 = "\x89HDF\r\n\x1a\n";

struct Damaged {
    std::string reason;
};

// Products and sums that stop at kMost instead of overflowing.
Count times(Count a, Count b) { return b && a > kMost / b ? kMost : std::min(a * b, kMost); }
Count plus(Count a, Count b) { return std::min(kMost, std::min(a, kMost) + std::min(b, kMost)); }
Count padded(Count bytes) { return plus(bytes, (4 - bytes % 4) % 4); }

struct Stored {
    std::string name;
    bool is_record;
    Count begin;
    Count bytes;  // of the values; of one record, if it is a record variable
};

// Sorts them by place.
void check_apart(std::vector<Stored> &stored) {
    std::sort(stored.begin(), stored.end(),
              [](const Stored &a, const Stored &b) { return a.begin < b.begin; });
    for (std::size_t i = 1; i < stored.size(); ++i)
        if (plus(stored[i - 1].begin, stored[i - 1].bytes) > stored[i].begin)
            throw Damaged{stored[i].name + ": its place is inside that of " + stored[i - 1].name};
}

// The header of a classic file: numbers are big-endian, everything is padded to 4 bytes.
class Header {
   public:
    Header(std::ifstream &file, Count size, int version)
        : file_(file), size_(size), count_bytes_(version == 5 ? 8 : 4),
          offset_bytes_(version == 1 ? 4 : 8) {}

    void check() {
        const Count records = count();
        if (records == (count_bytes_ == 8 ? ~Count{0} : Count{0xffffffff}))
            throw Damaged{
                "its header does not say how many records there are, so whether all are there "
                "cannot be known; write it again with nccopy"};
        const auto dims = read_dims();
        skip_attributes();
        std::vector<Stored> variables(list_of(kVariables));
        for (Stored &variable : variables) variable = read_variable(dims);
        // A single record variable is stored without padding between its records.
        Count stride = 0, alone = 0, num_record = 0;
        for (const Stored &v : variables)
            if (v.is_record) {
                stride = plus(stride, padded(v.bytes));
                alone = v.bytes;
                ++num_record;
            }
        if (num_record == 1) stride = alone;
        std::vector<Stored> fixed, first;  // of record variables, the first record
        for (const Stored &v : variables) {
            const Count repeats = v.is_record ? records : 1;
            if (!repeats || !v.bytes) continue;
            (v.is_record ? first : fixed).push_back(v);
            if (v.begin < position_)
                throw Damaged{v.name + ": its place is inside the header"};
            const Count needed = plus(plus(v.begin, times(repeats - 1, stride)), v.bytes);
            if (needed > size_)
                throw Damaged{"it has " + std::to_string(size_) + " bytes; " + v.name +
                              " alone needs the first " + std::to_string(needed)};
        }
        check_apart(first);
        if (!first.empty())
            fixed.push_back({"the records", true, first[0].begin, times(records, stride)});
        check_apart(fixed);
    }

   private:
    std::vector<Count> read_dims() {  // lengths; 0 is the record dim's
        std::vector<Count> dims(list_of(kDims));
        for (Count &length : dims) {
            name();
            length = count();
        }
        return dims;
    }

    Stored read_variable(const std::vector<Count> &dims) {
        Stored stored{name(), false, 0, 1};
        const Count rank = plausible(count());
        for (Count i = 0; i < rank; ++i) {
            const Count number = count();
            if (number >= dims.size())
                throw Damaged{stored.name + ": has a dim that is not there"};
            if (i == 0 && dims[number] == 0)
                stored.is_record = true;
            else
                stored.bytes = times(stored.bytes, dims[number]);
        }
        skip_attributes();
        stored.bytes = times(stored.bytes, type_bytes());
        count();  // the size in bytes, which does not hold what is greater than 4 GiB
        stored.begin = number(offset_bytes_);
        return stored;
    }

    void skip_attributes() {
        for (Count left = list_of(kAttributes); left; --left) {
            name();
            const Count element = type_bytes();
            skip(padded(times(element, count())));
        }
    }

    // How many entries a list has; of an absent list both numbers are 0.
    Count list_of(Count kind) {
        const Count tag = number(4), entries = count();
        if (tag != kind && (tag || entries))
            throw Damaged{"its header has " + std::to_string(tag) + " where a list of kind " +
                          std::to_string(kind) + " must be"};
        return plausible(entries);
    }

    // A number of entries, each of which takes 4 bytes at least.
    Count plausible(Count entries) {
        if (entries > std::min(size_, kLongestHeader) / 4)
            throw Damaged{"its header ends too early"};
        return entries;
    }

    Count type_bytes() {
        const Count type = number(4);
        if (type == 0 || type >= std::size(kBytesOfType))
            throw Damaged{"its header has type " + std::to_string(type) + ", which is not there"};
        return kBytesOfType[type];
    }

    std::string name() {
        const Count length = count();
        if (length > kLongestName)
            throw Damaged{"its header has a name of " + std::to_string(length) + " bytes"};
        std::string text(length, '\0');
        read(&text[0], length);
        skip(padded(length) - length);
        return printable(text);
    }

    Count count() { return number(count_bytes_); }

    Count number(int bytes) {
        unsigned char digits[8];
        read(reinterpret_cast<char *>(digits), bytes);
        Count value = 0;
        for (int i = 0; i < bytes; ++i) value = value << 8 | digits[i];
        return value;
    }

    void skip(Count bytes) {
        advance(bytes);
        file_.seekg(static_cast<std::streamoff>(position_));
    }

    void read(char *target, Count bytes) {
        advance(bytes);
        if (!file_.read(target, static_cast<std::streamsize>(bytes)))
            throw Damaged{"its header cannot be read"};
    }

    void advance(Count bytes) {
        position_ = plus(position_, bytes);
        if (position_ > std::min(size_, kLongestHeader))
            throw Damaged{"its header ends too early or does not end"};
    }

    std::ifstream &file_;
    Count size_;
    int count_bytes_, offset_bytes_;
    Count position_ = 4;
};

// Whether HDF5's signature is at the start, or behind a user block of 512 bytes or more.
bool is_hdf5(std::ifstream &file, Count size) {
    for (Count at = 0; at < size; at = std::max<Count>(2 * at, 512)) {
        std::string magic(kHdf5.size(), '\0');
        file.clear();
        file.seekg(static_cast<std::streamoff>(at));
        if (file.read(&magic[0], static_cast<std::streamsize>(magic.size())) && magic == kHdf5)
            return true;
    }
    return false;
}

}  // namespace

std::string printable(std::string text) {
    for (char &c : text)
        if (c < ' ' || c > '~') c = '?';
    return text;
}

std::string damage_of(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return "it cannot be opened";
    file.seekg(0, std::ios::end);
    const Count size = static_cast<Count>(std::max<std::streamoff>(file.tellg(), 0));
    file.seekg(0);
    char magic[4] = {};
    file.read(magic, 4);
    const bool classic = std::string(magic, 3) == "CDF" &&
                         (magic[3] == 1 || magic[3] == 2 || magic[3] == 5);
    if (!classic)
        return is_hdf5(file, size) ? "" : "it begins with neither CDF nor HDF";
    try {
        Header(file, size, magic[3]).check();
    } catch (const Damaged &damaged) {
        return damaged.reason;
    }
    return "";
}
