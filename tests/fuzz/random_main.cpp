// Feeds a fuzz target pseudo-random inputs, so that each target is also an ordinary test, with any
// compiler: `fuzz_<target> [inputs] [first seed]`. libFuzzer, which searches, comes with
// -Dfuzz=true.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  const unsigned long inputs = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 200;
  const unsigned long first = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 1;
  for (unsigned long seed = first; seed < first + inputs; ++seed) {
    std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
    std::vector<std::uint8_t> data(random() % 4096);
    for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random());
    // Said first, so that the last line of a crash names the input: fuzz_<target> 1 <seed>.
    std::fprintf(stderr, "\rseed %lu", seed);
    LLVMFuzzerTestOneInput(data.data(), data.size());
  }
  std::fprintf(stderr, "\n");
}
