// The published configurations that these tests read: tests/data/models, whose README says where
// each one comes from.
#pragma once

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kvleaf::test {

inline std::filesystem::path model_file(std::string_view name) {
  return std::filesystem::path(KVLEAF_TEST_DATA) / "models" / (std::string(name) + ".json");
}

inline nlohmann::json model_json(std::string_view name) {
  std::ifstream stream(model_file(name));
  return nlohmann::json::parse(stream);
}

}  // namespace kvleaf::test
