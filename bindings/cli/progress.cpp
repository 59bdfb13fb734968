#include "progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

#include "numbers.h"

namespace kvleaf::cli {
namespace {

constexpr auto bar_interval = std::chrono::milliseconds(100);

unsigned columns_of(std::FILE* terminal) {
  winsize size{};
  if (ioctl(fileno(terminal), TIOCGWINSZ, &size) == 0 && size.ws_col != 0) return size.ws_col;
  return 80;
}

double seconds_of(Progress::Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

std::string tail(const std::string& unit, std::uint64_t done, std::uint64_t total, double seconds) {
  std::string text = fmt::format("{}/{} {}", grouped(done), grouped(total), unit);
  if (done == 0 || seconds <= 0) return text;
  const double rate = static_cast<double>(done) / seconds;
  const auto left = static_cast<std::uint64_t>(static_cast<double>(total - done) / rate + 0.5);
  text += fmt::format(
      "  {}/s  {}:{:02} left",
      rate < 10 ? fmt::format("{:.1f}", rate) : grouped(static_cast<std::uint64_t>(rate)),
      left / 60, left % 60);
  return text;
}

}  // namespace

ProgressStyle progress_style(std::FILE* to) {
  return isatty(fileno(to)) == 1 ? ProgressStyle::bar : ProgressStyle::lines;
}

std::string progress_bar(const std::string& unit, std::uint64_t done, std::uint64_t total,
                         double seconds, unsigned columns) {
  done = std::min(done, total);
  const std::string text = tail(unit, done, total, seconds);
  if (columns < text.size() + 14) return text.substr(0, columns);
  const std::uint64_t width = std::min<std::uint64_t>(columns - text.size() - 4, 40);
  const std::uint64_t filled = total == 0 ? width : width * done / total;
  std::string bar(width, ' ');
  std::fill_n(bar.begin(), filled, '=');
  if (filled < width) bar[filled] = '>';
  return fmt::format("[{}] {}", bar, text);
}

Progress::Progress(Options options)
    : options_(std::move(options)), start_(Clock::now()), next_(start_) {
  if (options_.style == ProgressStyle::bar && options_.columns == 0) {
    options_.columns = columns_of(options_.to);
  }
  if (options_.style == ProgressStyle::lines) next_ += options_.interval;
}

Progress::~Progress() { finish(); }

void Progress::reach(std::uint64_t done, Clock::time_point now) {
  if (options_.style == ProgressStyle::none || now < next_) return;
  const double seconds = seconds_of(now - start_);
  if (options_.style == ProgressStyle::lines) {
    fmt::print(options_.to, "{}\n", tail(options_.unit, done, options_.total, seconds));
    next_ = now + options_.interval;
  } else {
    // The last column stays free: some terminals wrap when it is written.
    std::string bar =
        progress_bar(options_.unit, done, options_.total, seconds, options_.columns - 1);
    const std::size_t length = bar.size();
    if (length < shown_) bar.append(shown_ - length, ' ');
    fmt::print(options_.to, "\r{}", bar);
    shown_ = length;
    next_ = now + bar_interval;
  }
  std::fflush(options_.to);
}

void Progress::finish() {
  if (shown_ == 0) return;
  fmt::print(options_.to, "\r{}\r", std::string(shown_, ' '));
  std::fflush(options_.to);
  shown_ = 0;
}

}  // namespace kvleaf::cli
