// How far a long run is, on standard error: a bar with rate and remaining time on a terminal, a
// plain line every few seconds elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace kvleaf::cli {

enum class ProgressStyle : std::uint8_t {
  none,
  lines,  // one every few seconds
  bar     // rewritten in place; erased at the end
};

/// bar on a terminal, else lines.
ProgressStyle progress_style(std::FILE* to);

class Progress {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    std::string unit;         // what is counted, in the plural: "requests"
    std::uint64_t total = 0;  // of them
    ProgressStyle style = ProgressStyle::none;
    std::FILE* to = stderr;
    unsigned columns = 0;                                // of the terminal; 0: asked of it
    Clock::duration interval = std::chrono::seconds(5);  // between plain lines
  };
  explicit Progress(Options options);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of them are done. Cheap: most calls only look at the clock.
  void reach(std::uint64_t done) { reach(done, Clock::now()); }
  void reach(std::uint64_t done, Clock::time_point now);
  /// Erases the bar; a plain run has nothing to erase. Called by the destructor as well.
  void finish();

 private:
  Options options_;
  Clock::time_point start_;
  Clock::time_point next_;
  std::size_t shown_ = 0;  // characters of the bar on the screen
};

/// One state of the bar, `columns` wide at most: "[=====>    ] 1,234/2,000 requests  410/s  0:12
/// left".
std::string progress_bar(const std::string& unit, std::uint64_t done, std::uint64_t total,
                         double seconds, unsigned columns);

}  // namespace kvleaf::cli
