// Feeds a fuzz target pseudo-random inputs, so that each target is also an ordinary test, with any
// compiler: `fuzz_<target> [inputs] [first seed]`. libFuzzer, which searches, comes with
// -Dfuzz=true.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

volatile unsigned long seed = 0;

/// A target aborts when a rule breaks. The process ends here, so what may be called is no matter.
void name_the_seed(int) { std::fprintf(stderr, "with arguments: 1 %lu\n", seed); }

}  // namespace

int main(int argc, char** argv) {
  const unsigned long inputs = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 200;
  const unsigned long first = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 1;
  std::signal(SIGABRT, name_the_seed);
  for (unsigned long input = 0; input < inputs; ++input) {
    seed = first + input;
    std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
    std::vector<std::uint8_t> data(random() % 4096);
    for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random());
    LLVMFuzzerTestOneInput(data.data(), data.size());
  }
  std::printf("%lu inputs\n", inputs);
}
