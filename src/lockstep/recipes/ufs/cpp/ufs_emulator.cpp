// Predicts with an exported sea-ice emulator: outputs and Jacobians of rows of inputs, in physical
// units. Exit codes: 0, 1 when it is called without what it needs, 2 when an input is wrong.

#include <torch/csrc/autograd/autograd.h>
#include <torch/script.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "rows.h"

namespace {

constexpr int64_t kRowsAtATime = 1 << 14;

std::vector<std::string> texts(const torch::jit::Module &model, const char *name) {
    std::vector<std::string> texts;
    for (const c10::IValue &item : model.attr(name).toListRef()) texts.push_back(item.toStringRef());
    return texts;
}

std::vector<double> numbers(const torch::jit::Module &model, const char *name) {
    return model.attr(name).toDoubleVector();
}

// What the model says of its inputs. Throws UserError if it was exported without saying so.
std::vector<Input> inputs_of(const torch::jit::Module &model, const std::string &path) {
    if (!model.hasattr("cf_shifts"))
        throw UserError{path + ": does not say in which units its inputs are; export it again"};
    const auto brief = texts(model, "inputs"), cf = texts(model, "input_names"),
               unit = texts(model, "input_units"), cf_unit = texts(model, "cf_units"),
               spellings = texts(model, "spellings"), cf_spellings = texts(model, "cf_spellings");
    const auto shifts = numbers(model, "cf_shifts"), low = numbers(model, "low"),
               high = numbers(model, "high");
    std::vector<Input> inputs;
    for (std::size_t i = 0; i < brief.size(); ++i)
        inputs.push_back({brief[i], cf[i], unit[i], cf_unit[i], spellings[i], cf_spellings[i],
                          shifts[i], low[i], high[i]});
    return inputs;
}

torch::jit::Module load(const char *path) {
    try {
        auto model = torch::jit::load(path);
        model.eval();
        return model;
    } catch (const c10::Error &error) {
        throw UserError{std::string(path) + ": is no TorchScript model: " +
                        error.what_without_backtrace()};
    }
}

// ∂output/∂input of all rows, [rows, outputs, inputs]: a reverse pass for each output, which rows
// share since none depends on another.
torch::Tensor jacobians(const torch::Tensor &outputs, const torch::Tensor &inputs) {
    std::vector<torch::Tensor> slices;
    for (int64_t i = 0; i < outputs.size(1); ++i)
        slices.push_back(
            torch::autograd::grad({outputs.select(1, i).sum()}, {inputs}, {}, true)[0]);
    return torch::stack(slices, 1);
}

void print(int64_t first, const torch::Tensor &outputs, const torch::Tensor &jacobian,
           const std::vector<Input> &inputs, const std::vector<std::string> &output_names) {
    const auto values = outputs.accessor<float, 2>();
    const auto slopes = jacobian.accessor<float, 3>();
    for (int64_t row = 0; row < outputs.size(0); ++row) {
        std::printf("row %lld\n", static_cast<long long>(first + row));
        for (std::size_t o = 0; o < output_names.size(); ++o) {
            std::printf("  %s = %.9g\n", output_names[o].c_str(), values[row][o]);
            for (std::size_t i = 0; i < inputs.size(); ++i)
                std::printf("  d %s / d %s = %.9g\n", output_names[o].c_str(),
                            inputs[i].brief.c_str(), slopes[row][o][i]);
        }
    }
}

int run(const char *model_path, const char *rows_path) {
    auto model = load(model_path);
    const auto inputs = inputs_of(model, model_path);
    const auto outputs = texts(model, "outputs");
    std::printf("metadata %s\n", model.attr("metadata").toStringRef().c_str());
    auto rows = read_rows(rows_path, inputs);
    const auto width = static_cast<int64_t>(inputs.size());
    const auto count = static_cast<int64_t>(rows.size()) / width;
    const auto all = torch::from_blob(rows.data(), {count, width}, torch::kFloat32);
    for (int64_t first = 0; first < count; first += kRowsAtATime) {
        const auto x =
            all.narrow(0, first, std::min(kRowsAtATime, count - first)).clone().requires_grad_();
        const auto y = model.forward({x}).toTensor();
        print(first, y.detach(), jacobians(y, x), inputs, outputs);
    }
    return 0;
}

// One line, whatever names and values from files the message holds.
void complain(std::string message) {
    for (char &c : message)
        if (static_cast<unsigned char>(c) < ' ' || c == 127) c = ' ';
    std::fprintf(stderr, "error: %s\n", message.c_str());
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
        complain(error.message);
    } catch (const c10::Error &error) {
        complain(error.what_without_backtrace());
    } catch (const std::exception &error) {
        complain(error.what());
    }
    return 2;
}
