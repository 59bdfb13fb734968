// The progress bar and its plain form.
#include "progress.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "numbers.h"

using namespace kvleaf::cli;
using namespace std::chrono_literals;

namespace {

class Captured {
 public:
  std::FILE* file() { return file_.get(); }
  std::string text() {
    std::string out(static_cast<std::size_t>(std::ftell(file_.get())), '\0');
    std::rewind(file_.get());
    REQUIRE(std::fread(out.data(), 1, out.size(), file_.get()) == out.size());
    return out;
  }

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_{std::tmpfile(), &std::fclose};
};

}  // namespace

TEST_CASE("a bar shows count, rate and remaining time") {
  CHECK(progress_bar("requests", 500, 2000, 5.0, 80) ==
        "[==========>                             ] 500/2,000 requests  100/s  0:15 left");
  CHECK(progress_bar("requests", 0, 10, 0.0, 40) == "[>                      ] 0/10 requests");
  CHECK(progress_bar("requests", 10, 10, 4.0, 60) ==
        "[========================] 10/10 requests  2.5/s  0:00 left");
}

TEST_CASE("a bar never exceeds the terminal") {
  for (unsigned columns = 1; columns < 120; ++columns) {
    CHECK(progress_bar("requests", 1234, 56789, 3.0, columns).size() <= columns);
  }
}

TEST_CASE("a terminal gets one line that is rewritten and erased at the end") {
  Captured out;
  {
    Progress progress({.unit = "requests",
                       .total = 100,
                       .style = ProgressStyle::bar,
                       .to = out.file(),
                       .columns = 60});
    const auto now = Progress::Clock::now();
    progress.reach(10, now + 1s);
    progress.reach(11, now + 1s);  // too soon to be drawn again
    progress.reach(50, now + 2s);
  }
  const std::string text = out.text();
  CHECK(text.find("10/100") != std::string::npos);
  CHECK(text.find("11/100") == std::string::npos);
  CHECK(text.find("50/100") != std::string::npos);
  CHECK(text.find('\n') == std::string::npos);
  CHECK(text.back() == '\r');
}

TEST_CASE("elsewhere there is a plain line every few seconds, and none for a short run") {
  Captured out;
  Progress progress(
      {.unit = "requests", .total = 100, .style = ProgressStyle::lines, .to = out.file()});
  const auto now = Progress::Clock::now();
  for (int i = 1; i <= 12; ++i)
    progress.reach(static_cast<std::uint64_t>(i), now + std::chrono::seconds(i));
  progress.finish();
  const std::string text = out.text();
  CHECK(std::count(text.begin(), text.end(), '\n') == 2);
  CHECK(text.find('\r') == std::string::npos);
  CHECK(text.find("left") != std::string::npos);
  Captured nothing;
  Progress quiet(
      {.unit = "requests", .total = 100, .style = ProgressStyle::none, .to = nothing.file()});
  quiet.reach(5, now + 1h);
  CHECK(nothing.text().empty());
}

TEST_CASE("numbers are grouped, and bytes come in the largest unit that keeps them above one") {
  CHECK(grouped(0) == "0");
  CHECK(grouped(999) == "999");
  CHECK(grouped(1000) == "1,000");
  CHECK(grouped(1234567) == "1,234,567");
  CHECK(in_bytes(0) == "0 B");
  CHECK(in_bytes(1023) == "1023 B");
  CHECK(in_bytes(1536) == "1.5 KiB");
  CHECK(in_bytes(64.0 * (1ull << 30)) == "64.0 GiB");
  CHECK(in_microseconds(2.44) == "2.4 µs");
  CHECK(in_microseconds(12062.6) == "12,063 µs");
  CHECK(per_cent(1, 4) == 25);
  CHECK(per_cent(1, 0) == 0);
}
