// Predicts with an exported sea-ice emulator: outputs and Jacobians of rows of inputs, in physical
// units. Exit codes: 0, 1 when it is called without what it needs, 2 when an input is wrong.

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "emulator.h"
#include "rows.h"

namespace {

constexpr std::size_t kRowsAtATime = 1 << 14;

// One line, whatever names and values from files the message holds.
void complain(const char *kind, std::string message) {
    for (char &c : message)
        if (static_cast<unsigned char>(c) < ' ' || c == 127) c = ' ';
    std::fprintf(stderr, "%s: %s\n", kind, message.c_str());
}

void print(std::int64_t number, const float *outputs, const float *slopes,
           const Emulator &emulator) {
    std::printf("row %lld\n", static_cast<long long>(number));
    for (const std::string &output : emulator.outputs()) {
        std::printf("  %s = %.9g\n", output.c_str(), *outputs++);
        for (const Input &input : emulator.inputs())
            std::printf("  d %s / d %s = %.9g\n", output.c_str(), input.brief.c_str(), *slopes++);
    }
}

int run(const char *model_path, const char *rows_path) {
    const Emulator emulator(model_path);
    std::printf("metadata %s\n", emulator.metadata().c_str());
    const auto &inputs = emulator.inputs();
    const Rows rows = read_rows(rows_path, inputs, emulator.rules());
    for (std::size_t i = 0; i < inputs.size(); ++i)
        if (rows.clipped[i]) complain("warning", clipped_text(inputs[i], rows.clipped[i]));
    const std::size_t width = inputs.size(), num_outputs = emulator.outputs().size();
    std::vector<float> outputs(kRowsAtATime * num_outputs), jacobian(outputs.size() * width);
    for (std::size_t first = 0; first < rows.numbers.size(); first += kRowsAtATime) {
        const std::size_t count = std::min(kRowsAtATime, rows.numbers.size() - first);
        emulator.predict(&rows.values[first * width], static_cast<std::int64_t>(count),
                         outputs.data(), jacobian.data());
        for (std::size_t row = 0; row < count; ++row)
            print(rows.numbers[first + row], &outputs[row * num_outputs],
                  &jacobian[row * num_outputs * width], emulator);
    }
    return 0;
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 3) {
        std::fprintf(stderr, "usage: %s MODEL.ts ROWS.csv|ROWS.nc\n", arguments[0]);
        return 1;
    }
    try {
        return run(arguments[1], arguments[2]);
    } catch (const UserError &error) {
        complain("error", error.message);
    } catch (const std::exception &error) {  // c10::Error too
        complain("error", error.what());
    }
    return 2;
}
