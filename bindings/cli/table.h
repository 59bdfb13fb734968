// Columns of text that line up: the first column to the left, or as each column asks.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace kvleaf::cli {

class Table {
 public:
  enum class Align { left, right };
  struct Column {
    std::string title;
    Align align = Align::right;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  /// One cell per column; a row short of cells is empty there.
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  /// Lines with their newlines, no space at a line's end.
  std::string text() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace kvleaf::cli
