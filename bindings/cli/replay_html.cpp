// The HTML report: charts drawn as inline SVG, no script and no other file.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <map>

#include "numbers.h"
#include "replay_report.h"

namespace kvleaf::cli {
namespace {

constexpr double gib = 1024.0 * 1024.0 * 1024.0;
constexpr std::size_t most_series = 6;  // leaves drawn one by one; more are drawn by group
constexpr std::array colours = {"#2a78d6", "#eb6834", "#1baf7a", "#8b5cd6", "#d6a21a", "#d64a7b"};

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

/// Marks at round numbers (1, 2 or 5 times a power of ten), about `wanted` of them.
std::vector<double> round_marks(double end, int wanted) {
  if (!(end > 0)) return {0};
  const double raw = end / wanted;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  const double step = (raw / power <= 1   ? 1
                       : raw / power <= 2 ? 2
                       : raw / power <= 5 ? 5
                                          : 10) *
                      power;
  std::vector<double> marks;
  for (int i = 0; i * step <= end * 1.0001; ++i) marks.push_back(i * step);
  return marks;
}

std::string short_number(double value) {
  if (value >= 1e6) return fmt::format("{:g}M", value / 1e6);
  if (value >= 1e3) return fmt::format("{:g}k", value / 1e3);
  return fmt::format("{:g}", value);
}

/// A frame with two axes; data is placed by x and y in [0, 1], y upwards.
class Chart {
 public:
  static constexpr double width = 900, height = 280, left = 62, right = 18, top = 14, bottom = 44;

  Chart(std::string_view label, std::string x_title, std::string y_title)
      : x_title_(std::move(x_title)), y_title_(std::move(y_title)) {
    fmt::format_to(out(), "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", width,
                   height, escaped(label));
  }

  static double x(double share) { return left + share * (width - left - right); }
  static double y(double share) { return height - bottom - share * (height - top - bottom); }

  void x_mark(double share, const std::string& text) {
    fmt::format_to(out(), "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n",
                   x(share), height - bottom + 17, escaped(text));
  }
  void y_mark(double share, const std::string& text) {
    fmt::format_to(out(),
                   "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n"
                   "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
                   left, width - right, y(share), y(share), left - 7, y(share) + 4, escaped(text));
  }
  void area(const std::vector<std::pair<double, double>>& upper,
            const std::vector<std::pair<double, double>>& lower, std::string_view style,
            std::string_view name) {
    body_ += "<path d=\"M";
    for (const auto& [px, py] : upper) fmt::format_to(out(), " {:.1f},{:.1f}", x(px), y(py));
    for (auto it = lower.rbegin(); it != lower.rend(); ++it) {
      fmt::format_to(out(), " {:.1f},{:.1f}", x(it->first), y(it->second));
    }
    fmt::format_to(out(), " Z\" style=\"{}\"><title>{}</title></path>\n", style, escaped(name));
  }
  void line(const std::vector<std::pair<double, double>>& points, std::string_view style,
            std::string_view name) {
    body_ += "<polyline fill=\"none\" points=\"";
    for (const auto& [px, py] : points) fmt::format_to(out(), "{:.1f},{:.1f} ", x(px), y(py));
    fmt::format_to(out(), "\" style=\"{}\"><title>{}</title></polyline>\n", style, escaped(name));
  }
  void bar(double x0, double x1, double share, std::string_view name) {
    fmt::format_to(out(),
                   "<rect class=\"bar\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
                   "height=\"{:.1f}\"><title>{}</title></rect>\n",
                   x(x0) + 0.5, y(share), std::max(0.5, x(x1) - x(x0) - 1), y(0) - y(share),
                   escaped(name));
  }
  void upright(double share, double text_at, const std::string& text) {
    const bool flip = share > 0.85;
    fmt::format_to(
        out(),
        "<line class=\"mark\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\"/>\n"
        "<text x=\"{3:.1f}\" y=\"{4:.1f}\" text-anchor=\"{5}\">{6}</text>\n",
        x(share), y(0), y(1), x(share) + (flip ? -5 : 5), y(text_at), flip ? "end" : "start",
        escaped(text));
  }
  std::string finish() {
    fmt::format_to(out(),
                   "<line class=\"axis\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>\n"
                   "<text class=\"title\" x=\"{3}\" y=\"{4}\" text-anchor=\"middle\">{5}</text>\n"
                   "<text class=\"title\" transform=\"translate(14 {6:.1f}) rotate(-90)\" "
                   "text-anchor=\"middle\">{7}</text>\n</svg>\n",
                   left, width - right, y(0), x(0.5), height - 7, escaped(x_title_), y(0.5),
                   escaped(y_title_));
    return std::move(body_);
  }

 private:
  std::back_insert_iterator<std::string> out() { return std::back_inserter(body_); }

  std::string body_;
  std::string x_title_;
  std::string y_title_;
};

void request_axis(Chart& chart, double requests) {
  for (const double mark : round_marks(requests, 8)) {
    chart.x_mark(mark / requests, short_number(mark));
  }
}

// ---- memory
// ---------------------------------------------------------------------------------------

struct Series {
  std::string name;
  std::vector<std::size_t> leaves;
};

std::vector<Series> series_of(const Replay& replay) {
  std::vector<Series> series;
  const bool by_group = replay.leaves.size() > most_series;
  for (std::size_t i = 0; i < replay.leaves.size(); ++i) {
    const std::string& name = by_group ? replay.leaves[i].group : replay.leaves[i].id;
    auto found = std::ranges::find(series, name, &Series::name);
    if (found == series.end()) found = series.insert(series.end(), {name, {}});
    found->leaves.push_back(i);
  }
  return series;
}

std::string memory_chart(const Replay& replay, const ReplaySubject& subject) {
  const std::vector<Moment>& moments = replay.moments;
  const auto requests = static_cast<double>(replay.requests.size());
  const auto arena = static_cast<double>(subject.arena_bytes);
  // A budget that nothing fills would flatten everything.
  const double top = std::min(arena, std::max(replay.peak_bytes * 1.08, 1.0));

  Chart chart("Memory of each leaf over the requests", "requests", "GiB");
  for (const double mark : round_marks(top / gib, 5)) {
    chart.y_mark(mark * gib / top, short_number(mark));
  }
  request_axis(chart, requests);
  std::vector<std::pair<double, double>> below;
  for (const Moment& moment : moments) below.emplace_back(moment.request / requests, 0);
  std::string legend;
  const auto layer = [&](const std::string& name, const std::string& style, auto bytes_at) {
    std::vector<std::pair<double, double>> above = below;
    for (std::size_t i = 0; i < moments.size(); ++i) above[i].second += bytes_at(moments[i]) / top;
    chart.area(above, below, style, name);
    below = std::move(above);
    legend += fmt::format("<span><i style=\"{}\"></i>{}</span>", style, escaped(name));
  };
  const std::vector<Series> series = series_of(replay);
  for (std::size_t s = 0; s < series.size(); ++s) {
    const std::string colour = colours[s % colours.size()];
    const auto sum = [&](double LeafBytes::*figure) {
      return [&, figure](const Moment& moment) {
        double bytes = 0;
        for (const std::size_t leaf : series[s].leaves) bytes += moment.leaves[leaf].*figure;
        return bytes;
      };
    };
    const std::string paint = fmt::format("fill:{0};background:{0};", colour);
    layer(series[s].name + " live", paint, sum(&LeafBytes::live));
    layer(series[s].name + " cached", paint + "opacity:.45", sum(&LeafBytes::cached));
  }
  layer("padding", "fill:#8a8a86;background:#8a8a86;", [](const Moment& moment) {
    double bytes = 0;
    for (const LeafBytes& leaf : moment.leaves) bytes += leaf.padding;
    return bytes;
  });
  return fmt::format("<div class=\"legend\">{}</div>\n{}", legend, chart.finish());
}

// ---- hits
// -----------------------------------------------------------------------------------------

std::string hit_chart(const Replay& replay, const ReplaySubject& subject) {
  const auto requests = static_cast<double>(replay.requests.size());
  Chart chart("Share of prompt tokens reused", "requests", "% of prompt tokens");
  request_axis(chart, requests);
  std::vector<std::pair<double, double>> lately;
  std::vector<std::pair<double, double>> so_far;
  const std::size_t stride = std::max<std::size_t>(1, replay.moments.size() / 64);
  std::uint64_t prompt = 0;
  std::uint64_t hit = 0;
  double most = 0;
  for (std::size_t i = 0; i < replay.moments.size(); ++i) {
    const Moment& moment = replay.moments[i];
    const double at = moment.request / requests;
    so_far.emplace_back(at, per_cent(moment.hit_tokens, moment.prompt_tokens));
    most = std::max(most, so_far.back().second);
    if ((i + 1) % stride != 0) continue;
    lately.emplace_back(at, per_cent(moment.hit_tokens - hit, moment.prompt_tokens - prompt));
    most = std::max(most, lately.back().second);
    prompt = moment.prompt_tokens;
    hit = moment.hit_tokens;
  }
  if (subject.bound)
    most = std::max({most, subject.bound->lru_pct(), subject.bound->optimum_pct()});
  double top = 100;
  for (const double smaller : {50.0, 20.0, 10.0}) {
    if (most <= smaller) top = smaller;
  }
  for (auto* points : {&lately, &so_far}) {
    for (auto& point : *points) point.second /= top;
  }
  for (const double mark : round_marks(top, 5)) chart.y_mark(mark / top, short_number(mark));
  const auto colour = [](std::size_t i) {
    return fmt::format("stroke:{0};background:{0};", colours[i]);
  };
  chart.line(lately, colour(0) + "stroke-width:1;opacity:.8", "lately");
  chart.line(so_far, colour(1) + "stroke-width:2", "since the start");
  std::string legend = fmt::format(
      "<span><i style=\"{}opacity:.8\"></i>lately (1/64 of the run)</span>"
      "<span><i style=\"{}\"></i>since the start</span>",
      colour(0), colour(1));
  if (subject.bound) {  // of the whole run: a level
    const auto level = [&](std::size_t i, double per_cent, std::string_view name) {
      chart.line({{0, per_cent / top}, {1, per_cent / top}},
                 colour(i) + "stroke-width:1.5;stroke-dasharray:5 4", std::string(name));
      legend += fmt::format("<span><i style=\"{}\"></i>{}, whole run: {:.2f} %</span>", colour(i),
                            name, per_cent);
    };
    level(2, subject.bound->lru_pct(), "LRU");
    level(3, subject.bound->optimum_pct(), "offline optimum");
  }
  return fmt::format("<div class=\"legend\">{}</div>\n{}", legend, chart.finish());
}

// ---- step times
// -----------------------------------------------------------------------------------

std::string step_chart(const Replay& replay) {
  // Bins of equal width in the logarithm.
  constexpr int bins_per_decade = 16;
  std::map<int, std::uint64_t> bins;
  const auto bin_of = [](double us) {
    return static_cast<int>(std::floor(std::log10(std::max(us, 0.01)) * bins_per_decade));
  };
  for (const float us : replay.step_us) ++bins[bin_of(us)];
  Chart chart("Step times", "µs of plan and settle (logarithmic)", "steps");
  if (bins.empty()) return chart.finish();

  const auto decade = [](int bin, auto round) {
    return static_cast<int>(round(static_cast<double>(bin) / bins_per_decade)) * bins_per_decade;
  };
  const int first = decade(bins.begin()->first, [](double d) { return std::floor(d); });
  const int end = decade(bins.rbegin()->first + 1, [](double d) { return std::ceil(d); });
  const double width = std::max(end - first, 1);
  std::uint64_t most = 0;
  for (const auto& [bin, count] : bins) most = std::max(most, count);
  const double top = static_cast<double>(most) * 1.08;
  for (const double mark : round_marks(top, 5)) chart.y_mark(mark / top, short_number(mark));
  for (int bin = first; bin <= end; bin += bins_per_decade) {
    chart.x_mark((bin - first) / width, short_number(std::pow(10, bin / bins_per_decade)));
  }
  for (const auto& [bin, count] : bins) {
    chart.bar(
        (bin - first) / width, (bin + 1 - first) / width, static_cast<double>(count) / top,
        fmt::format("{:.1f} to {:.1f} µs: {} steps",
                    std::pow(10, static_cast<double>(bin) / bins_per_decade),
                    std::pow(10, static_cast<double>(bin + 1) / bins_per_decade), grouped(count)));
  }
  const auto place = [&](double us) {
    return (std::log10(std::max(us, 0.01)) * bins_per_decade - first) / width;
  };
  for (const auto& [share, name, at] :
       {std::tuple{0.5, "median", 0.94}, std::tuple{0.99, "p99", 0.84}}) {
    const double us = replay.step_quantile(share);
    chart.upright(place(us), at, fmt::format("{} {}", name, in_microseconds(us)));
  }
  return chart.finish();
}

// ---- the page
// ---------------------------------------------------------------------------------------

constexpr std::string_view style = R"(
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1c1c1a; --soft: #6b6b66; --line: #e3e2de; --tile: #f3f2ef; }
@media (prefers-color-scheme: dark) {
  :root { --page: #1a1a19; --ink: #f2f1ed; --soft: #a3a29b; --line: #383835; --tile: #262624; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 980px; padding: 28px 20px 48px; background: var(--page); color: var(--ink);
       font: 15px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; }
h2 { font-size: 16px; margin: 32px 0 8px; }
p { margin: 0; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 10px; margin: 20px 0 8px; }
.tiles div { background: var(--tile); border-radius: 8px; padding: 10px 14px; color: var(--soft); font-size: 13px; }
.tiles b { display: block; white-space: nowrap; font-size: 22px; font-weight: 600; color: var(--ink); font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); } .mark { stroke: var(--ink); stroke-dasharray: 4 3; }
.bar { fill: #2a78d6; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); margin-bottom: 6px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
th.text, td.text { text-align: left; white-space: normal; }
)";

std::string tile(const std::string& figure, std::string_view name) {
  return fmt::format("<div><b>{}</b>{}</div>\n", escaped(figure), name);
}

std::string leaf_rows(const Replay& replay) {
  std::string rows;
  for (const LeafReport& leaf : replay.leaves) {
    rows += fmt::format("<tr><td>{}</td>", escaped(leaf.id));
    for (const auto figure :
         {&LeafBytes::live, &LeafBytes::cached, &LeafBytes::clean, &LeafBytes::padding}) {
      rows += fmt::format("<td>{}</td><td>{}</td>", in_bytes(leaf.peak.*figure),
                          in_bytes(leaf.mean.*figure));
    }
    rows += fmt::format("<td>{}</td><td>{}</td></tr>\n", grouped(leaf.blocks),
                        grouped(leaf.lost_tokens));
  }
  return rows;
}

std::string refusal_table(const Replay& replay) {
  if (replay.refusals.empty()) return "";
  std::string rows;
  for (const RefusalReport& refusal : replay.refusals) {
    rows += fmt::format(
        "<tr><td class=\"text\">{}</td><td>{}</td><td>{}</td><td class=\"text\">{}</td></tr>\n",
        escaped(refusal.reason), grouped(refusal.count), refusal.row, escaped(refusal.example));
  }
  return fmt::format(
      "<h2>Refused</h2>\n<div class=\"wide\"><table><tr><th>reason</th><th>count</th><th>first "
      "row</th>"
      "<th class=\"text\">what was said of it</th></tr>\n{}</table></div>\n",
      rows);
}

std::string base_name(const std::string& file) {
  return std::filesystem::path(file).filename().string();
}

}  // namespace

std::string to_html(const Replay& replay, const ReplaySubject& subject) {
  const std::string title =
      fmt::format("{} over {}", base_name(subject.trace), base_name(subject.model));
  std::string page = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width\"><title>kvleaf: {0}</title>\n"
      "<style>{1}</style></head><body>\n<h1>{0}</h1>\n"
      "<p>{2}, pages of {3} tokens, at most {4} live, steps of {5} tokens, retention {6}, eviction "
      "by "
      "{7}; {8} huge blocks of {9}</p>\n",
      escaped(title), style, in_bytes(static_cast<double>(subject.budget_bytes)),
      subject.page_tokens, subject.max_live, grouped(subject.max_step_tokens),
      escaped(subject.retention), escaped(subject.eviction), grouped(subject.huge_blocks),
      in_bytes(static_cast<double>(subject.huge_bytes)));

  page += "<div class=\"tiles\">\n";
  page += tile(grouped(replay.requests.size()), "requests");
  page += tile(fmt::format("{:.2f} %", replay.hit_pct()), "of prompt tokens reused");
  if (subject.bound) {
    page += tile(fmt::format("{:.2f} %", subject.bound->lru_pct()), "LRU would reuse");
    page += tile(fmt::format("{:.2f} %", subject.bound->optimum_pct()),
                 "the offline optimum would reuse");
  }
  page += tile(grouped(replay.refused), "requests refused");
  page += tile(grouped(replay.growth_refused), "answers refused");
  page += tile(in_bytes(replay.peak_bytes), "in use at the peak");
  page += tile(in_microseconds(replay.us_per_request()), "of manager and planner a request");
  page += tile(in_microseconds(replay.step_quantile(0.5)), "median step");
  page += tile(in_microseconds(replay.step_quantile(0.99)), "p99 step");
  if (subject.verified) {
    page += tile(grouped(subject.verified->entries_checked), "entries read back and equal");
  }
  page += "</div>\n";

  page += "<h2>Memory over time</h2>\n" + memory_chart(replay, subject);
  page += "<h2>Reuse over time</h2>\n" + hit_chart(replay, subject);
  if (subject.bound) {
    page += fmt::format(
        "<p>LRU and the offline optimum serve prompts alone, one after another, from a cache of {}."
        "</p>\n",
        subject.bound->pages ? grouped(subject.bound->tokens()) + " tokens" : "any size");
  }
  page += "<h2>Step times</h2>\n" + step_chart(replay);
  page += fmt::format(
      "<h2>Leaves</h2>\n<div class=\"wide\"><table>\n<tr><th>leaf</th>"
      "<th>live, peak</th><th>mean</th><th>cached, peak</th><th>mean</th><th>clean, "
      "peak</th><th>mean</th>"
      "<th>padding, peak</th><th>mean</th><th>blocks</th><th>lost "
      "tokens</th></tr>\n{}</table></div>\n",
      leaf_rows(replay));
  page += refusal_table(replay);
  page += "</body></html>\n";
  return page;
}

}  // namespace kvleaf::cli
