#include "table.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvleaf::cli {

std::string Table::text() const {
  std::vector<std::vector<std::string>> lines(1);
  for (const Column& column : columns_) lines[0].push_back(column.title);
  lines.insert(lines.end(), rows_.begin(), rows_.end());

  std::vector<std::size_t> widths(columns_.size(), 0);
  for (std::vector<std::string>& line : lines) {
    line.resize(columns_.size());
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (const std::vector<std::string>& line : lines) {
    std::string out;
    for (std::size_t i = 0; i < line.size(); ++i) {
      if (i > 0) out += "  ";
      out += columns_[i].align == Align::left ? fmt::format("{:<{}}", line[i], widths[i])
                                              : fmt::format("{:>{}}", line[i], widths[i]);
    }
    out.erase(out.find_last_not_of(' ') + 1);
    text += out + '\n';
  }
  return text;
}

}  // namespace kvleaf::cli
