// A whole engine in small: requests with true tokens, a device with bytes, and a manager and
// planner that are told what an engine tells them. After every operation the manager audits; before
// every forward each entry that it reads is compared with what it must be.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device.h"
#include "test_access.h"

namespace kvleaf::testing {

/// What a run is made of.
struct Mix {
  std::string name;
  Leaves leaves;
  std::uint32_t page = 4;
  std::uint32_t max_len = 64;
  std::uint32_t max_step = 32;
  std::uint32_t least_huge = 6;  // the pool is between these, by seed
  std::uint32_t most_huge = 30;
  std::uint32_t largest_ratio = 3;
  Retention retention = Retention::tail();
  bool caching = true;
  bool drafts = true;  // steps may be kept in part
};

class World {
 public:
  World(const Mix& mix, std::uint64_t seed, std::vector<std::string>* log = nullptr);
  void run(std::uint32_t operations);
  /// Releases everything, settles everything, drops the cache: all blocks must be empty again.
  void end();

  std::uint64_t hit_tokens = 0, checked_words = 0, refused = 0, failed_steps = 0,
                emitted_states = 0;

 private:
  struct Person {  // a request, as its engine knows it
    RequestId id{0};
    AdmitOptions options;
    std::vector<Token> truth;  // what the model will have said, known to the manager or not
    std::vector<std::uint64_t> hashes;  // [i]: of the first i tokens and all they depend on
    std::uint32_t known = 0;
    std::uint32_t prompt = 0;
    std::uint32_t planned = 0;
    std::uint32_t in_flight = 0;
    std::uint64_t serial = 0;
    bool filled = false;  // the encoder's pages are written
    bool scratch_written = false;
    bool published = true;
  };
  struct Flight {
    StepId id{0};
    struct Row {
      std::uint64_t serial;
      RequestId id;
      std::uint32_t begin, count, known;
    };
    std::vector<Row> rows;
    std::vector<std::pair<Device::Index, std::uint64_t>> reads;  // and what they must go on to hold
    Device::UndoLog undo;
  };
  struct Past {
    std::vector<Token> tokens;
    AdmitOptions options;
  };

  static Geometry geometry(const Mix& mix, Random& random);
  template <class... Parts>
  void say(fmt::format_string<Parts...> format, Parts&&... parts) {
    if (log_ != nullptr) log_->push_back(fmt::format(format, std::forward<Parts>(parts)...));
  }
  template <class... Parts>
  static void require(bool good, fmt::format_string<Parts...> format, Parts&&... parts) {
    if (!good) throw Broken(fmt::format(format, std::forward<Parts>(parts)...));
  }

  // Operations.
  void operate();
  void admit(std::optional<RequestId> again);
  void step();
  void settle();
  void abandon();
  void append();
  void fork();
  void rewind();
  void release();
  void preempt();
  void fill_encoder();
  void misuse();

  // The model.
  Person* anyone();
  void hash_on(Person& p);  // hashes up to the end of truth
  void know_truth(Person& p, std::uint32_t length);
  void cut_truth(Person& p, std::uint32_t length);
  std::uint64_t depends_on(const Person& p, std::uint32_t position) const;
  std::uint64_t text_word(const Person& p, LeafId leaf, std::uint32_t token) const;
  std::uint64_t state_word(const Person& p, LeafId leaf, std::uint32_t tokens) const;
  std::uint64_t encoder_word(const Person& p, LeafId leaf, std::uint32_t token) const;
  bool cuts_item(const Person& p, std::uint32_t end) const;
  void forward(const StepPlan& plan, Flight& flight);
  void forward_text(const StepPlan& plan, Flight& flight, LeafId leaf, std::size_t row, Person& p);
  void forward_state(const StepPlan& plan, Flight& flight, LeafId leaf, std::size_t row, Person& p);
  void check_lengths();
  void check_promises();
  bool whole_row_written(LeafId leaf) const;
  const KVLeafRegion& leaf_of(LeafId leaf) const { return *mix_.leaves[leaf.value()]; }

  const Mix& mix_;
  Random random_;
  std::vector<std::string>* log_;
  std::unique_ptr<BlockManager> manager_;
  std::unique_ptr<StepPlanner> planner_;
  std::unique_ptr<Device> device_;
  std::map<std::uint64_t, Person> people_;  // by id
  std::map<std::uint64_t, Person> preempted_;
  std::deque<Flight> flights_;
  std::vector<Past> past_;
  std::uint64_t next_id_ = 1;
  std::uint64_t serials_ = 0;
  bool any_ahead_ = false, any_encoder_ = false, any_state_ = false;
};

}  // namespace kvleaf::testing
