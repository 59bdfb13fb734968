// Numbers as people read them.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <string>

namespace kvleaf::cli {

/// "1,234,567".
inline std::string grouped(std::uint64_t number) {
  std::string text = fmt::to_string(number);
  for (std::size_t i = text.size(); i > 3;) text.insert(i -= 3, 1, ',');
  return text;
}

/// "0 B", "512 B", "1.5 KiB", "64.0 GiB": three or four digits.
inline std::string in_bytes(double bytes) {
  constexpr std::array units = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  for (; bytes >= 1023.95 && unit + 1 < units.size(); ++unit) bytes /= 1024;
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 1, units[unit]);
}

/// "2.4 µs", "12,063 µs".
inline std::string in_microseconds(double us) {
  return us < 1000 ? fmt::format("{:.1f} µs", us)
                   : grouped(static_cast<std::uint64_t>(us + 0.5)) + " µs";
}

/// Per cent of `whole`; 0 of nothing.
inline double per_cent(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0 : 100 * static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace kvleaf::cli
