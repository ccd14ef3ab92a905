// The only source that needs LibTorch, and minutes of a compiler if there were more.
#include "emulator.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cstring>

using torch::jit::Module;

namespace {

std::vector<std::string> as_texts(const c10::IValue &list) {
    std::vector<std::string> texts;
    for (const c10::IValue &item : list.toListRef()) texts.push_back(item.toStringRef());
    return texts;
}

std::vector<std::string> texts(const Module &model, const char *name) {
    return as_texts(model.attr(name));
}

std::vector<std::vector<std::string>> lists(const Module &model, const char *name) {
    std::vector<std::vector<std::string>> lists;
    for (const c10::IValue &list : model.attr(name).toListRef()) lists.push_back(as_texts(list));
    return lists;
}

Module load(const std::string &path) {
    try {
        Module model = torch::jit::load(path);
        model.eval();
        return model;
    } catch (const c10::Error &error) {
        throw UserError{path + ": is no TorchScript model: " + error.what_without_backtrace()};
    }
}

std::vector<Input> inputs_of(const Module &model) {
    const auto brief = texts(model, "inputs"), cf = texts(model, "input_names"),
               cice = texts(model, "cice_names"), unit = texts(model, "input_units"),
               cf_unit = texts(model, "cf_units");
    const auto units = lists(model, "units"), spellings = lists(model, "spellings");
    const c10::IValue factors = model.attr("factors"), shifts = model.attr("shifts");
    const auto low = model.attr("low").toDoubleVector(), high = model.attr("high").toDoubleVector(),
               slack = model.attr("slack").toDoubleVector();
    std::vector<Input> inputs;
    for (std::size_t i = 0; i < brief.size(); ++i) {
        Input input;
        input.brief = brief[i];
        input.cf = cf[i];
        input.cice = cice[i];
        input.unit = unit[i];
        input.cf_unit = cf_unit[i];
        const auto factor = factors.toListRef()[i].toDoubleVector(),
                   shift = shifts.toListRef()[i].toDoubleVector();
        for (std::size_t k = 0; k < units[i].size(); ++k)
            input.units.push_back({units[i][k], spellings[i][k], factor[k], shift[k]});
        input.low = low[i];
        input.high = high[i];
        input.slack = slack[i];
        inputs.push_back(input);
    }
    return inputs;
}

}  // namespace

struct Emulator::Model {
    Module module;
};

Emulator::Emulator(const std::string &path) : model_(new Model{load(path)}) {
    const Module &model = model_->module;
    if (!model.hasattr("slack"))
        throw UserError{path + ": does not say in which units its inputs are; export it again"};
    inputs_ = inputs_of(model);
    outputs_ = texts(model, "outputs");
    output_units_ = texts(model, "output_units");
    metadata_ = model.attr("metadata").toStringRef();
    rules_.masks = lists(model, "masks");
    for (const auto &pair : lists(model, "signs")) rules_.signs.emplace_back(pair[0], pair[1]);
}

Emulator::~Emulator() = default;

void Emulator::predict(const float *rows, std::int64_t count, float *outputs,
                       float *jacobian) const {
    const auto width = static_cast<std::int64_t>(inputs_.size());
    // Into memory of its own: a module's call must not change what the caller gave.
    at::Tensor x = at::from_blob(const_cast<float *>(rows), {count, width}, at::kFloat).clone();
    at::AutoGradMode with_gradients(jacobian != nullptr);
    x.requires_grad_(jacobian != nullptr);
    Module module = model_->module;  // shares everything; `forward` is not const
    const at::Tensor y = module.forward({x}).toTensor();
    const auto copy = [](const at::Tensor &from, float *to) {
        const at::Tensor values = from.detach().to(at::kFloat).contiguous();
        std::memcpy(to, values.data_ptr<float>(), static_cast<std::size_t>(values.numel()) * 4);
    };
    copy(y, outputs);
    if (!jacobian) return;
    // A reverse pass for each output, which rows share since none depends on another.
    std::vector<at::Tensor> slices;
    for (std::int64_t i = 0; i < y.size(1); ++i)
        slices.push_back(torch::autograd::grad({y.select(1, i).sum()}, {x}, {}, true)[0]);
    copy(at::stack(slices, 1), jacobian);
}
