// Predicts with an exported sea-ice emulator: outputs and Jacobians of rows of inputs, in physical
// units. Exit codes: 0, 1 when it is called without what it needs, 2 when an input is wrong.

#include <torch/csrc/autograd/autograd.h>
#include <torch/script.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "rows.h"

namespace {

std::vector<std::string> texts(const torch::jit::Module &model, const char *name) {
    std::vector<std::string> found;
    for (const c10::IValue &item : model.attr(name).toListRef()) found.push_back(item.toStringRef());
    return found;
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

void print(const torch::Tensor &outputs, const torch::Tensor &jacobian,
           const std::vector<std::string> &input_names,
           const std::vector<std::string> &output_names) {
    const auto values = outputs.accessor<float, 2>();
    const auto slopes = jacobian.accessor<float, 3>();
    for (int64_t row = 0; row < outputs.size(0); ++row) {
        std::printf("row %lld\n", static_cast<long long>(row));
        for (std::size_t o = 0; o < output_names.size(); ++o) {
            std::printf("  %s = %.9g\n", output_names[o].c_str(), values[row][o]);
            for (std::size_t i = 0; i < input_names.size(); ++i)
                std::printf("  d %s / d %s = %.9g\n", output_names[o].c_str(),
                            input_names[i].c_str(), slopes[row][o][i]);
        }
    }
}

int run(const char *model_path, const char *rows_path) {
    auto model = load(model_path);
    const Names names{texts(model, "inputs"), texts(model, "input_names")};
    std::printf("metadata %s\n", model.attr("metadata").toStringRef().c_str());
    auto rows = read_rows(rows_path, names);
    const auto width = static_cast<int64_t>(names.brief.size());
    auto inputs = torch::from_blob(rows.data(), {static_cast<int64_t>(rows.size()) / width, width},
                                   torch::kFloat64)
                      .to(torch::kFloat32)
                      .requires_grad_();
    const auto outputs = model.forward({inputs}).toTensor();
    print(outputs.detach(), jacobians(outputs, inputs), names.brief, texts(model, "outputs"));
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
        std::fprintf(stderr, "error: %s\n", error.message.c_str());
    } catch (const c10::Error &error) {
        std::fprintf(stderr, "error: %s\n", error.what_without_backtrace());
    } catch (const std::exception &error) {
        std::fprintf(stderr, "error: %s\n", error.what());
    }
    return 2;
}
