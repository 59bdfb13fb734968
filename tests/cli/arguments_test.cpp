// Values on the command line, and the columns that answers are printed in.
#include "arguments.h"

#include <doctest/doctest.h>

#include "kvleaf/leaf/errors.h"
#include "table.h"

namespace kvleaf::cli {
namespace {

TEST_CASE("a size is a number and a unit, in any case and with or without a space") {
  const std::uint64_t GiB = std::uint64_t{1} << 30;
  CHECK(parse_size("16GiB") == 16 * GiB);
  CHECK(parse_size("16 GiB") == 16 * GiB);
  CHECK(parse_size("16g") == 16 * GiB);
  CHECK(parse_size("64 MiB") == 64 << 20);
  CHECK(parse_size("1.5G") == GiB + GiB / 2);
  CHECK(parse_size("2TiB") == 2048 * GiB);
  CHECK(parse_size("1KB") == 1000);
  CHECK(parse_size("16 gb") == 16000000000);
  CHECK(parse_size("1000000") == 1000000);
  CHECK(parse_size("7 B") == 7);
  CHECK(parse_size("0.5k") == 512);
}

TEST_CASE("what is no size is refused with what is accepted") {
  for (const char* text : {"", " ", "GiB", "16XB", "16 GiB GiB", "1.2.3G", "-5", "+5", "16Gi B",
                           "1e9", "0x10", "1,000", "1.5", "nan", "inf", "16GiB2"})
    CHECK_THROWS_WITH_AS(parse_size(text), doctest::Contains("expected a number of bytes"),
                         InvalidArgument);
  for (const char* text : {"0", "0GiB", "0.0001k", "8388608TiB", "99999999999999999999999"})
    CHECK_THROWS_WITH_AS(parse_size(text), doctest::Contains("expected 1 byte to"),
                         InvalidArgument);
}

TEST_CASE("a count is an integer from 1") {
  CHECK(parse_count("1", 10) == 1);
  CHECK(parse_count("10", 10) == 10);
  for (const char* text : {"", "0", "11", "-1", "1.0", "ten", "4294967297", " 1"})
    CHECK_THROWS_WITH_AS(parse_count(text, 10),
                         doctest::Contains("expected an integer from 1 to 10"), InvalidArgument);
}

TEST_CASE("columns line up, and no line ends in a space") {
  Table table({{"leaf", Table::Align::left}, {"bytes"}, {"per", Table::Align::left}});
  table.row({"full", "1,024", "token"});
  table.row({"window_128", "8"});
  CHECK(table.text() ==
        "leaf        bytes  per\n"
        "full        1,024  token\n"
        "window_128      8\n");
}

}  // namespace
}  // namespace kvleaf::cli
