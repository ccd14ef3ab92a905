// What an emulator's inputs are: names, units and what is plausible. The same rules as in Lockstep's
// variables.yaml, whose tables the exported model carries.
#pragma once

#include <string>
#include <utility>
#include <vector>

// What the user can mend: the message says how.
struct UserError {
    std::string message;
};

// A unit that values can be given in: value * factor + shift is in the emulator's unit.
struct Unit {
    std::string name;
    std::string spellings;  // what a `units` attribute may say, after `plain`, with | between them
    double factor = 1, shift = 0;
};

// One input. Under its short name and its name in history files a value is in `unit`, under its CF
// name in `cf_unit`, unless a `units` attribute says another one.
struct Input {
    std::string brief, cf, cice;  // names
    std::string unit, cf_unit;
    std::vector<Unit> units;  // those that are accepted, that of the emulator first
    double low = 0, high = 0, slack = 0;
};

// What the model says that is the same for all inputs.
struct Conventions {
    std::vector<std::vector<std::string>> masks;  // of history files: mask, latitude, longitude
    std::vector<std::pair<std::string, std::string>> signs;  // of units: what they are read as
};

// The unit of an input that has a name.
const Unit &unit_named(const Input &input, const std::string &name);

// The unit of an input that a `units` attribute says, null if it is none that is accepted.
const Unit *unit_spelt(const Input &input, const std::string &said, const Conventions &rules);

// The names of all accepted units, for messages.
std::string accepted(const Input &input);

// A value in the emulator's unit, float32 as in training.
float converted(double value, const Unit &unit);

// Puts a value that is a little out of range at its end, and says so. Throws UserError if it is not
// finite or not plausible; `name` is what it is called and `where` it is from.
bool clip(float *value, const Input &input, const Unit &unit, const std::string &name,
          const std::string &where);

// What there is to say about values that were clipped; empty if there are none.
std::string clipped_text(const Input &input, std::size_t count);
