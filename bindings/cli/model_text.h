// The head of a report: which model it is about.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "arguments.h"

namespace kvleaf::cli {

/// Lines, with their newlines: the file, its model_type, what its layers keep, options that differ
/// from the usual.
std::string model_text(const ModelLeaves& model, const ModelArguments& arguments);
/// The same as keys of an object.
nlohmann::ordered_json model_json(const ModelLeaves& model, const ModelArguments& arguments);

}  // namespace kvleaf::cli
