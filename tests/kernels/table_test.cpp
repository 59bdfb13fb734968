#include "kvleaf/kernels/table.h"

#include <algorithm>
#include <numeric>

#include "kernels/machine.h"

namespace kvleaf::kernels::test {
namespace {

TEST_CASE_TEMPLATE("a scatter writes the listed places of a table and no others", Machine,
                   KVLEAF_MACHINES) {
  if (skipped<Machine>()) return;
  Random random(31);
  for (int round = 0; round < 200; ++round) {
    const auto rows = static_cast<std::int64_t>(draw(random, 1, 12));
    const auto columns = static_cast<std::int64_t>(draw(random, 1, 40));
    // Row-major with room at the end of a row, or column-major, as a table of [layers, batch] may
    // be.
    const bool row_major = draw(random, 0, 1) == 0;
    const std::int64_t room = static_cast<std::int64_t>(draw(random, 0, 3));
    const std::int64_t row_stride = row_major ? columns + room : 1;
    const std::int64_t column_stride = row_major ? 1 : rows + room;
    std::vector<std::int32_t> before((rows + room) * (columns + room), 0);
    for (std::int32_t& entry : before) entry = static_cast<std::int32_t>(random());

    std::vector<std::int64_t> places(rows * columns);
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), random);
    places.resize(draw(random, 0, places.size()));
    std::vector<std::int32_t> list_rows, list_columns, values, expected = before;
    for (const std::int64_t place : places) {
      const auto value = static_cast<std::int32_t>(random());
      list_rows.push_back(static_cast<std::int32_t>(place / columns));
      list_columns.push_back(static_cast<std::int32_t>(place % columns));
      values.push_back(value);
      expected[place / columns * row_stride + place % columns * column_stride] = value;
      if (draw(random, 0, 5) == 0) {  // padding: the rest of it may be anything
        list_rows.push_back(-1);
        list_columns.push_back(static_cast<std::int32_t>(random()));
        values.push_back(static_cast<std::int32_t>(random()));
      }
    }
    typename Machine::Buffer buffer(as_bytes(before));
    Machine::scatter_table(
        {reinterpret_cast<std::int32_t*>(buffer.data()), rows, columns, row_stride, column_stride},
        list_rows, list_columns, values);
    const Bytes after = buffer.download();
    REQUIRE(std::memcmp(after.data(), expected.data(), after.size()) == 0);
  }
}

TEST_CASE("a scatter outside the table or of unequal lists writes nothing") {
  std::vector<std::int32_t> data(12, 7);
  const TableView table{data.data(), 3, 4, 4};
  const auto refused = [&](std::vector<std::int32_t> rows, std::vector<std::int32_t> columns,
                           std::vector<std::int32_t> values) {
    CHECK_THROWS_AS(scatter_table(table, rows, columns, values), KernelError);
    CHECK(data == std::vector<std::int32_t>(12, 7));
  };
  refused({0, 3}, {0, 0}, {1, 1});
  refused({0, 1}, {0, 4}, {1, 1});
  refused({0, 1}, {0, -1}, {1, 1});
  refused({0, -2}, {0, 0}, {1, 1});
  refused({0, 1}, {0}, {1, 1});
  refused({0, 1}, {0, 1}, {1});
}

}  // namespace
}  // namespace kvleaf::kernels::test
