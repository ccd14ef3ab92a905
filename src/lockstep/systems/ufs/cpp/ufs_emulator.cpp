#include "ufs_emulator.h"

#include <algorithm>
#include <cfenv>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "emulator.h"

struct ufs_emulator {
    Emulator emulator;
};

namespace {

constexpr std::int64_t kColumnsAtATime = 1 << 13;

struct Refusal {
    int status;
    std::string message;
};

// Vector units compute lanes that nobody reads: their traps would end an ice model.
class QuietFloats {
   public:
    QuietFloats() { std::feholdexcept(&before_); }
    ~QuietFloats() { std::fesetenv(&before_); }
    QuietFloats(const QuietFloats &) = delete;
    QuietFloats &operator=(const QuietFloats &) = delete;

   private:
    std::fenv_t before_;
};

void tell(const std::string &text, char *message, std::int64_t length) {
    if (!message || length < 1) return;
    const auto count = std::min(static_cast<std::size_t>(length - 1), text.size());
    std::transform(text.begin(), text.begin() + static_cast<long>(count), message, [](char c) {
        return static_cast<unsigned char>(c) < ' ' || c == 127 ? ' ' : c;
    });
    message[count] = '\0';
}

template <class Work>
int guarded(Work work, int status, char *message, std::int64_t length) {
    const QuietFloats quiet;
    std::string text;
    try {
        work();
        tell("", message, length);
        return UFS_OK;
    } catch (const Refusal &refusal) {
        tell(refusal.message, message, length);
        return refusal.status;
    } catch (const UserError &error) {
        tell(error.message, message, length);
        return status;
    } catch (const std::exception &error) {
        tell(error.what(), message, length);
    } catch (...) {
        tell("an unknown error", message, length);
    }
    return UFS_FAILED;
}

void require(bool is_so, const char *what) {
    if (!is_so) throw Refusal{UFS_BAD_ARGUMENT, what};
}

// Columns `first` to `first + count` as rows of float32, checked.
std::int64_t gather(const Emulator &emulator, const double *inputs, std::int64_t num_columns,
                    std::int64_t first, std::int64_t count, std::vector<float> *rows) {
    const auto width = static_cast<std::int64_t>(emulator.inputs().size());
    rows->resize(static_cast<std::size_t>(count * width));
    std::int64_t clipped = 0;
    for (std::int64_t i = 0; i < width; ++i) {
        const Input &input = emulator.inputs()[static_cast<std::size_t>(i)];
        const double *field = inputs + i * num_columns + first;
        const auto low = static_cast<float>(input.low), high = static_cast<float>(input.high);
        for (std::int64_t c = 0; c < count; ++c) {
            auto value = static_cast<float>(field[c]);
            if (!(value >= low && value <= high))
                clipped += clip(&value, input, input.units[0], input.brief,
                                input.brief + " of column " + std::to_string(first + c + 1));
            (*rows)[static_cast<std::size_t>(c * width + i)] = value;
        }
    }
    return clipped;
}

int compute(const ufs_emulator *handle, std::int64_t num_columns, const double *inputs,
            double *outputs, double *jacobian, std::int64_t *num_clipped, char *message,
            std::int64_t length) {
    return guarded(
        [&] {
            require(handle, "emulator: is null; load it first");
            require(num_columns >= 0, "num_columns: is negative");
            require(num_columns == 0 || inputs, "inputs: is null");
            const Emulator &emulator = handle->emulator;
            const std::size_t width = emulator.inputs().size(), made = emulator.outputs().size();
            // All is computed before anything is written: a bad column leaves arrays as they were.
            const auto total = static_cast<std::size_t>(num_columns);
            std::vector<double> y(total * made), slopes(jacobian ? y.size() * width : 0);
            std::vector<float> rows, out, slope;
            std::int64_t clipped = 0;
            for (std::int64_t first = 0; first < num_columns; first += kColumnsAtATime) {
                const auto n = std::min(kColumnsAtATime, num_columns - first);
                const auto count = static_cast<std::size_t>(n), at = static_cast<std::size_t>(first);
                clipped += gather(emulator, inputs, num_columns, first, n, &rows);
                out.resize(count * made);
                slope.resize(jacobian ? out.size() * width : 0);
                emulator.predict(rows.data(), n, out.data(), jacobian ? slope.data() : nullptr);
                for (std::size_t c = 0; c < count; ++c) {
                    for (std::size_t k = 0; k < made; ++k) y[k * total + at + c] = out[c * made + k];
                    for (std::size_t k = 0; jacobian && k < made * width; ++k)
                        slopes[k * total + at + c] = slope[c * made * width + k];
                }
            }
            if (outputs) std::copy(y.begin(), y.end(), outputs);
            if (jacobian) std::copy(slopes.begin(), slopes.end(), jacobian);
            if (num_clipped) *num_clipped = clipped;
        },
        UFS_BAD_VALUE, message, length);
}

}  // namespace

extern "C" {

int ufs_load(const char *path, ufs_emulator **emulator, char *message, int64_t length) {
    if (emulator) *emulator = nullptr;
    return guarded(
        [&] {
            require(path && emulator, "path, emulator: is null");
            *emulator = new ufs_emulator{Emulator(path)};
        },
        UFS_BAD_MODEL, message, length);
}

void ufs_free(ufs_emulator *emulator) {
    const QuietFloats quiet;
    delete emulator;
}

int64_t ufs_num_inputs(const ufs_emulator *emulator) {
    return emulator ? static_cast<int64_t>(emulator->emulator.inputs().size()) : 0;
}

int64_t ufs_num_outputs(const ufs_emulator *emulator) {
    return emulator ? static_cast<int64_t>(emulator->emulator.outputs().size()) : 0;
}

int ufs_name(const ufs_emulator *emulator, int kind, int64_t number, char *message,
             int64_t length) {
    std::string text;
    const int status = guarded(
        [&] {
            require(emulator, "emulator: is null; load it first");
            const bool is_input = kind == UFS_INPUT || kind == UFS_INPUT_UNIT;
            require(is_input || kind == UFS_OUTPUT || kind == UFS_OUTPUT_UNIT,
                    "kind: is none that there is");
            const int64_t count =
                is_input ? ufs_num_inputs(emulator) : ufs_num_outputs(emulator);
            require(number >= 0 && number < count, "number: there are not so many");
            const auto at = static_cast<std::size_t>(number);
            const Emulator &model = emulator->emulator;
            text = kind == UFS_INPUT        ? model.inputs()[at].brief
                   : kind == UFS_INPUT_UNIT ? model.inputs()[at].unit
                   : kind == UFS_OUTPUT     ? model.outputs()[at]
                                            : model.output_units()[at];
        },
        UFS_FAILED, message, length);
    if (status == UFS_OK) tell(text, message, length);
    return status;
}

int ufs_predict(const ufs_emulator *emulator, int64_t num_columns, const double *inputs,
                double *outputs, int64_t *num_clipped, char *message, int64_t length) {
    if (num_columns > 0 && !outputs) {
        tell("outputs: is null", message, length);
        return UFS_BAD_ARGUMENT;
    }
    return compute(emulator, num_columns, inputs, outputs, nullptr, num_clipped, message, length);
}

int ufs_jacobian(const ufs_emulator *emulator, int64_t num_columns, const double *inputs,
                 double *outputs, double *jacobian, int64_t *num_clipped, char *message,
                 int64_t length) {
    if (num_columns > 0 && !jacobian) {
        tell("jacobian: is null", message, length);
        return UFS_BAD_ARGUMENT;
    }
    return compute(emulator, num_columns, inputs, outputs, jacobian, num_clipped, message, length);
}

}  // extern "C"
