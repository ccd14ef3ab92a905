// An exported emulator: what it says of itself, its outputs and Jacobians. No header of LibTorch is
// needed to use it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "inputs.h"

class Emulator {
   public:
    // Throws UserError if the file is no emulator.
    explicit Emulator(const std::string &path);
    ~Emulator();

    const std::vector<Input> &inputs() const { return inputs_; }
    const std::vector<std::string> &outputs() const { return outputs_; }  // short names
    const std::vector<std::string> &output_units() const { return output_units_; }
    const std::string &metadata() const { return metadata_; }
    const Conventions &rules() const { return rules_; }

    // Outputs [count, outputs] of rows [count, inputs], row by row in the emulator's units, and
    // ∂output/∂input [count, outputs, inputs] if `jacobian` is not null. May be called from several
    // threads at once. What LibTorch raises comes through.
    void predict(const float *rows, std::int64_t count, float *outputs, float *jacobian) const;

   private:
    struct Model;
    std::unique_ptr<Model> model_;
    std::vector<Input> inputs_;
    std::vector<std::string> outputs_, output_units_;
    std::string metadata_;
    Conventions rules_;
};
