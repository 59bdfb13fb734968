#include "kvleaf/pool/geometry_search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

namespace kvleaf {
namespace {

__extension__ using u128 = unsigned __int128;
using u64 = std::uint64_t;

constexpr u64 kMost = std::numeric_limits<u64>::max();
constexpr u64 kLargestHuge = u64{1} << 63;  // exclusive: sums of two sizes stay below 2^64

constexpr u64 ceil_div(u64 a, u64 b) noexcept { return a / b + (a % b != 0); }

/// `value` rounded up to a multiple of `step`, as a number that cannot wrap.
constexpr u128 round_up(u64 value, u64 step) noexcept {
  return (u128(value) + (step - 1)) / step * step;
}

u64 unit_of(const PageShape& shape) noexcept {
  return shape.packed ? shape.bytes : shape.alignment;
}

/// Σ_classes ⌈leaves_c / r_c⌉: huge blocks that hold one block of every leaf. Sums the leaves of
/// equal ratio in `scratch`.
class Classes {
 public:
  void build(std::span<const PageShape> shapes, std::span<const u64> ratios) {
    classes_.clear();
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      classes_.push_back({ratios[i], shapes[i].leaves});
    }
    std::sort(classes_.begin(), classes_.end(),
              [](const Class& a, const Class& b) { return a.ratio < b.ratio; });
    std::size_t last = 0;
    for (std::size_t i = 1; i < classes_.size(); ++i) {
      if (classes_[i].ratio == classes_[last].ratio) {
        classes_[last].leaves += classes_[i].leaves;
      } else {
        classes_[++last] = classes_[i];
      }
    }
    classes_.resize(last + 1);
  }

  u64 huge_blocks_needed() const noexcept {
    u64 needed = 0;
    for (const Class& c : classes_) needed += ceil_div(c.leaves, c.ratio);
    return needed;
  }
  /// Σ_classes (H - stride_c)
  u128 half_used(u64 huge) const noexcept {
    u128 sum = 0;
    for (const Class& c : classes_) sum += huge - huge / c.ratio;
    return sum;
  }

 private:
  struct Class {
    u64 ratio;
    u64 leaves;
  };
  std::vector<Class> classes_;  // by ratio; kept between calls so that it need not grow again
};

/// A goal is what Walk, below, asks while it looks for the best huge block:
///   last_huge()              a larger huge block cannot be better than the best so far
///   widest_stride(s, huge)   nor can one of at least `huge` bytes with a wider stride of shape s
///   offer(huge, ratios)      a member of the domain, with the largest ratio of each shape
/// Both bounds only ever fall, so what was skipped once would be skipped again.
class Cheapest {
 public:
  Cheapest(const TilingProblem& problem, u64 budget)
      : problem_(problem),
        budget_(budget),
        per_byte_(1.0 / static_cast<double>(budget)),
        least_null_(round_up(problem.largest_page(), problem.null_alignment)) {
    if (least_null_ >= budget) return;  // last_huge_ stays 0: there is no room for a huge block
    last_huge_ = std::min<u64>(problem.cap, budget - static_cast<u64>(least_null_));
  }

  u64 last_huge() const noexcept { return last_huge_; }

  u64 widest_stride(std::size_t i, u64 huge) const noexcept {
    // The null page is as wide as the widest stride, and one huge block must fit beside it.
    const u64 fits = huge < budget_ ? budget_ - huge : 0;
    return std::min(fits, stride_within(problem_.shapes[i], room(huge)));
  }

  void offer(u64 huge, std::span<const u64> ratios) {
    const double most = best_cost_ + slack();
    double cost = 0;
    u64 widest = 0;
    for (std::size_t i = 0; i < ratios.size(); ++i) {
      const PageShape& shape = problem_.shapes[i];
      const u64 stride = huge / ratios[i];
      widest = std::max(widest, stride);
      cost += shape.weight *
              (static_cast<double>(stride - shape.bytes) / static_cast<double>(shape.bytes));
      if (cost > most) return;
    }
    const u128 null_bytes = round_up(widest, problem_.null_alignment);
    if (null_bytes >= budget_) return;
    const u64 rest = budget_ - static_cast<u64>(null_bytes);
    const u64 count = rest / huge;
    classes_.build(problem_.shapes, ratios);
    if (count == 0 || classes_.huge_blocks_needed() > count) return;
    cost += static_cast<double>(budget_ - count * huge) * per_byte_;
    cost += static_cast<double>(classes_.half_used(huge)) * (0.5 * per_byte_);

    const bool equal = std::abs(cost - best_cost_) <= slack();
    if (equal ? huge >= best_.huge_bytes : cost > best_cost_) return;
    best_cost_ = cost;
    best_ = {huge, count, static_cast<u64>(null_bytes), {ratios.begin(), ratios.end()}};
    narrow_bounds();
  }

  std::optional<Tiling> take() && {
    if (best_.huge_bytes == 0) return std::nullopt;
    return std::move(best_);
  }

 private:
  /// What costs may differ by and be equal: far above the rounding of a few dozen terms.
  double slack() const noexcept {
    return std::isinf(best_cost_) ? 0 : 1e-14 * std::max(1.0, best_cost_);
  }

  /// The padding that a better tiling by huge blocks of at least `huge` bytes may cost: what the
  /// null page leaves, less the half-used huge block of the class with the narrowest stride.
  double room(u64 huge) const noexcept {
    if (std::isinf(best_cost_)) return best_cost_;
    const double half = huge > narrowest_ ? 0.5 * static_cast<double>(huge - narrowest_) : 0;
    return best_cost_ + 4 * slack() - (static_cast<double>(least_null_) + half) * per_byte_;
  }

  /// The widest stride of `shape` whose padding alone stays within `room`.
  static u64 stride_within(const PageShape& shape, double room) noexcept {
    if (room < 0) return 0;
    if (shape.packed) return shape.bytes;
    const double padding = static_cast<double>(shape.bytes) * (room / shape.weight);
    // One byte more and a little in proportion, for the rounding of this bound itself.
    const double widest = static_cast<double>(shape.bytes) + padding * (1 + 1e-9) + 1;
    return widest < static_cast<double>(kLargestHuge) ? static_cast<u64>(widest) : kMost;
  }

  void narrow_bounds() noexcept {
    narrowest_ = kMost;
    const double room_at_0 = room(0);
    for (const PageShape& shape : problem_.shapes) {
      narrowest_ = std::min(narrowest_, stride_within(shape, room_at_0));
    }
    // Beyond this the half-used huge block of the narrowest class alone costs more than there is
    // room.
    const double last = static_cast<double>(narrowest_) +
                        2 * room_at_0 * static_cast<double>(budget_) * (1 + 1e-9) + 1;
    if (last < static_cast<double>(last_huge_)) last_huge_ = static_cast<u64>(std::max(0.0, last));
  }

  const TilingProblem& problem_;
  const u64 budget_;
  const double per_byte_;
  const u128 least_null_;  // of any tiling
  u64 last_huge_ = 0;
  u64 narrowest_ = kMost;  // bound on the narrowest stride of a tiling better than the best
  double best_cost_ = std::numeric_limits<double>::infinity();
  Tiling best_;
  Classes classes_;
};

/// The goal of the least budget: null + needed · H. The least huge block must be offered first.
///
/// The bounds use that a better tiling than that by the least huge block needs two huge blocks or
/// more. One is enough only for leaves of one class whose stride s meets all alignments at once, so
/// s is no less than the least huge block; and n blocks of stride s and a null page of s take no
/// less than what the least huge block needs at worst, n of it and the null page.
class Smallest {
 public:
  explicit Smallest(const TilingProblem& problem)
      : problem_(problem), least_null_(round_up(problem.largest_page(), problem.null_alignment)) {}

  u64 last_huge() const noexcept {
    if (!offered_least_) return kMost;
    return least_null_ < best_bytes_ ? (best_bytes_ - static_cast<u64>(least_null_)) / 2 : 0;
  }
  u64 widest_stride(std::size_t i, u64 huge) const noexcept {
    if (!offered_least_) return kMost;
    const u64 null_page = huge <= best_bytes_ / 2 ? best_bytes_ - 2 * huge : 0;
    const PageShape& shape = problem_.shapes[i];
    return shape.packed ? std::min(null_page, shape.bytes) : null_page;
  }
  void offer(u64 huge, std::span<const u64> ratios) {
    offered_least_ = true;
    const u64 widest = huge / *std::min_element(ratios.begin(), ratios.end());
    const u128 null_bytes = round_up(widest, problem_.null_alignment);
    classes_.build(problem_.shapes, ratios);
    const u64 needed = classes_.huge_blocks_needed();
    const u128 bytes = null_bytes + u128(needed) * huge;
    if (bytes > best_bytes_ || (bytes == best_bytes_ && best_.huge_bytes != 0)) return;
    best_bytes_ = static_cast<u64>(bytes);
    best_ = {huge, needed, static_cast<u64>(null_bytes), {ratios.begin(), ratios.end()}};
  }
  std::optional<Tiling> take() && {
    if (best_.huge_bytes == 0) return std::nullopt;
    return std::move(best_);
  }

 private:
  const TilingProblem& problem_;
  const u128 least_null_;
  bool offered_least_ = false;
  u64 best_bytes_ = kMost;  // what is more than this is no budget
  Tiling best_;
  Classes classes_;
};

/// Offers to a goal every huge block of the domain that its bounds do not exclude.
///
/// A segment of consecutive multiples is sieved shape by shape: for each stride within the goal's
/// bound (or for each ratio, whichever are fewer) the multiples that it divides are marked with the
/// ratio, larger ratios last. So the work is that of the pairs (stride, huge block) that do divide,
/// about ln(1 + padding allowed) per huge block and shape, and no huge block is ever factored.
template <class Goal>
class Walk {
 public:
  Walk(const TilingProblem& problem, u64 unit, Goal& goal)
      : problem_(problem),
        unit_(unit),
        goal_(goal),
        marks_(problem.shapes.size()),
        ratios_(problem.shapes.size()) {
    // What the heaviest shape cannot afford need not be looked up for the others.
    for (std::size_t i = 0; i < problem.shapes.size(); ++i) order_.push_back(i);
    std::stable_sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
      return problem.shapes[a].weight > problem.shapes[b].weight;
    });
  }

  /// Returns the steps it took.
  u64 run() {
    const std::size_t shapes = problem_.shapes.size();
    const u64 widest_segment = std::clamp<u64>((u64{1} << 19) / shapes, 1 << 10, 1 << 16);
    u64 length = 256;  // short at first, while the goal knows no bound
    for (u64 first = ceil_div(problem_.largest_page(), unit_);;) {
      const u64 last = std::min(problem_.cap, goal_.last_huge()) / unit_;
      if (first > last) return steps_;
      length = std::min(length, last - first + 1);
      segment(first, length);
      first += length;
      length = std::min(2 * length, widest_segment);
    }
  }

 private:
  /// Whether every multiple of the unit holds these pages without padding.
  bool always_exact(const PageShape& shape) const noexcept {
    return unit_ % shape.bytes == 0 && shape.bytes % unit_of(shape) == 0;
  }

  void segment(u64 first, u64 length) {
    bool whole = true;  // alive_ stands for the whole segment: no shape was sieved yet
    for (std::size_t i : order_) {
      if (always_exact(problem_.shapes[i])) continue;
      std::vector<u64>& marks = marks_[i];
      steps_ += whole ? length : alive_.size();
      if (whole) {
        marks.assign(length, 0);
        sieve(i, first, length);
        alive_.clear();
        for (u64 k = 0; k < length; ++k) {
          if (marks[k] != 0) alive_.push_back(k);
        }
        whole = false;
      } else {
        // Only what every shape before has marked is read, so only that is cleared.
        if (marks.size() < length) marks.resize(length);
        for (u64 k : alive_) marks[k] = 0;
        sieve(i, first, length);
        std::erase_if(alive_, [&](u64 k) { return marks[k] == 0; });
      }
      if (alive_.empty()) return;
    }
    if (whole) {
      alive_.resize(length);
      std::iota(alive_.begin(), alive_.end(), u64{0});
    }
    steps_ += alive_.size() * ratios_.size();
    for (u64 k : alive_) {
      for (std::size_t i = 0; i < ratios_.size(); ++i) {
        const PageShape& shape = problem_.shapes[i];
        ratios_[i] = always_exact(shape) ? (first + k) * (unit_ / shape.bytes) : marks_[i][k];
      }
      goal_.offer((first + k) * unit_, ratios_);
    }
  }

  /// Marks the multiples [first, first + length) that shape i's strides divide with the largest
  /// ratio.
  void sieve(std::size_t i, u64 first, u64 length) {
    const PageShape& shape = problem_.shapes[i];
    const u64 last = first + length - 1;
    const u64 align = shape.alignment;
    // Strides are t · align; t divides k · m, and the ratio is k · m / t.
    const u64 m = unit_ / align;
    const u64 t_min = ceil_div(shape.bytes, align);
    const u64 t_max = std::min(goal_.widest_stride(i, first * unit_) / align, last * m);
    if (t_max < t_min) return;
    const u64 r_min = ceil_div(first * m, t_max);
    const u64 r_max = last * m / t_min;
    if (r_max < r_min) return;

    std::vector<u64>& marks = marks_[i];
    steps_ += std::min(t_max - t_min, r_max - r_min) + 1;
    if (t_max - t_min < r_max - r_min) {
      for (u64 t = t_max; t >= t_min; --t) {  // t_min >= 1: ends
        const u64 common = m == 1 ? 1 : std::gcd(t, m);
        const u64 step = t / common;
        const u64 per_step = m / common;
        for (u64 k = ceil_div(first, step) * step; k <= last; k += step) {
          marks[k - first] = k / step * per_step;
          ++steps_;
        }
      }
    } else {
      for (u64 r = r_min; r <= r_max; ++r) {
        const u64 step = m == 1 ? r : r / std::gcd(r, m);
        const u64 begin = std::max<u64>(first, static_cast<u64>((u128(r) * t_min + (m - 1)) / m));
        const u64 end = static_cast<u64>(std::min<u128>(last, u128(r) * t_max / m));
        for (u64 k = ceil_div(begin, step) * step; k <= end; k += step) {
          marks[k - first] = r;
          ++steps_;
        }
      }
    }
  }

  const TilingProblem& problem_;
  const u64 unit_;
  Goal& goal_;
  std::vector<std::size_t> order_;       // shapes, heaviest first
  std::vector<std::vector<u64>> marks_;  // per shape, by multiple of the segment: ratio, 0 for none
  std::vector<u64> alive_;               // multiples of the segment that every shape so far marked
  std::vector<u64> ratios_;              // of the huge block on offer
  u64 steps_ = 0;                        // see SearchWork
};

}  // namespace

u64 TilingProblem::largest_page() const noexcept {
  u64 largest = 0;
  for (const PageShape& shape : shapes) largest = std::max(largest, shape.bytes);
  return largest;
}

std::optional<u64> TilingProblem::least_huge() const noexcept {
  const u128 least = round_up(largest_page(), unit);
  if (least >= kLargestHuge) return std::nullopt;
  return static_cast<u64>(least);
}

std::optional<u64> forced_unit(const std::vector<PageShape>& shapes) noexcept {
  u64 unit = 1;
  for (const PageShape& shape : shapes) {
    const u64 next = unit_of(shape);
    const u128 common = u128(unit / std::gcd(unit, next)) * next;
    if (common >= kLargestHuge) return std::nullopt;
    unit = static_cast<u64>(common);
  }
  return unit;
}

std::optional<Tiling> cheapest_tiling(const TilingProblem& problem, u64 budget, SearchWork* work) {
  if (budget == 0) return std::nullopt;
  Cheapest goal(problem, budget);
  // Multiples of smooth numbers have many divisors, so the best huge blocks are often among them. A
  // coarse walk over these costs little and gives the full walk its bound from the start.
  for (const u64 grain : {u64{5040}, u64{60}, u64{1}}) {
    if (grain > 1 && problem.cap / problem.unit / grain < 256) continue;
    const u64 steps = Walk(problem, problem.unit * grain, goal).run();
    if (work != nullptr) work->steps += steps;
  }
  return std::move(goal).take();
}

std::optional<Tiling> smallest_tiling(const TilingProblem& problem, SearchWork* work) {
  Smallest goal(problem);
  const u64 steps = Walk(problem, problem.unit, goal).run();
  if (work != nullptr) work->steps += steps;
  return std::move(goal).take();
}

}  // namespace kvleaf
