// The HTML report: well-formed and safe for any data, from none to a large model.
#include "report/report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "report/svg.hpp"

namespace nibble::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

/// Empty when every tag is closed in order and no stray '<' or '&' is left; else where it is not.
std::string malformed(const std::string& html) {
  std::vector<std::string> open;
  for (std::size_t at = html.find_first_of("<&"); at != std::string::npos; at = html.find_first_of("<&", at + 1)) {
    const std::string where = html.substr(at, 60);
    if (html[at] == '&') {
      const std::size_t end = html.find_first_not_of("#abcdefghijklmnopqrstuvwxyz0123456789", at + 1);
      if (end == std::string::npos || html[end] != ';') return "stray & at " + where;
      continue;
    }
    const std::size_t end = html.find('>', at);
    if (end == std::string::npos) return "unclosed tag at " + where;
    const std::string tag = html.substr(at + 1, end - at - 1);
    if (std::ranges::count(tag, '"') % 2 || tag.find('<') != std::string::npos) return "broken tag at " + where;
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return "unexpected end tag at " + where;
      open.pop_back();
    } else if (tag[0] != '!' && tag.back() != '/' && tag.substr(0, 5) != "meta ") {
      open.push_back(tag.substr(0, tag.find(' ')));
    }
    if (tag == "style") at = html.find("</style>", at) - 1;
  }
  return open.empty() ? "" : "never closed: " + open.back();
}

TEST(ReportTest, CheckerFindsFaults) {
  EXPECT_EQ(malformed("<!doctype html><meta x=\"y\"><p class=\"a\">x &amp; y<line/></p>"), "");
  EXPECT_THAT(malformed("<p><b></p></b>"), HasSubstr("unexpected end tag"));
  EXPECT_THAT(malformed("<p>"), HasSubstr("never closed"));
  EXPECT_THAT(malformed("a & b"), HasSubstr("stray &"));
  EXPECT_THAT(malformed("<p title=\"><b></p>"), HasSubstr("broken tag"));
}

/// A model of 7 layers per block, with everything a report can hold.
ReportData model(int blocks) {
  struct Projection {
    const char* name;
    std::int64_t n, k;
  };
  constexpr Projection kProjections[] = {{"self_attn.q_proj", 2048, 2048}, {"self_attn.k_proj", 512, 2048},
                                         {"self_attn.v_proj", 512, 2048},  {"self_attn.o_proj", 2048, 2048},
                                         {"mlp.gate_proj", 8192, 2048},    {"mlp.up_proj", 8192, 2048},
                                         {"mlp.down_proj", 2048, 8192}};
  ReportData data;
  data.title = "Llama 3.2 1B, 4-bit";
  data.date = "2025-01-31";
  data.version = "0.1.0";
  data.commit = "0123abc";
  data.checkpoint = "models/llama-3.2-1b-awq";
  data.formats = {"awq"};
  data.bits_per_weight = 4.25;
  data.device.cpu_name = "Example CPU 9000";
  data.device.cores = 8;
  data.roofline = {8, 42.5, 610};
  data.notes = {{Note::Severity::info, "config.json names no quant_method; recognised by tensor names"}};
  int salt = 0;
  for (int block = 0; block < blocks; ++block)
    for (const Projection& p : kProjections) {
      const double wobble = 0.5 + 0.5 * std::sin(12.9898 * ++salt);  // in [0, 1]
      ReportLayer layer;
      layer.name = "model.layers." + std::to_string(block) + "." + p.name;
      layer.n = p.n;
      layer.k = p.k;
      layer.scheme = "u4zg128";
      layer.bits_per_weight = 4.25;
      layer.kernel = "gemm_f16_f16_u4zg128__avx512_m16n32k128";
      layer.error = QuantError{19 + 2 * wobble - (salt % 29 == 28 ? 5 : 0), 0.994, 0.011, 0.1};
      VerifyReport verify;
      verify.passed = true;
      verify.worst_error_over_bound = 0.02 * std::pow(10, wobble);
      verify.relative_l2 = 3e-4;
      layer.verify = verify;
      if (p.k == 8192 && block % 4 == 1)
        layer.notes.push_back({Note::Severity::warning, "zero points of 3 groups are outside 0…15"});
      for (std::int64_t m : {1, 4, 16, 128}) {
        const double weights = static_cast<double>(p.n) * static_cast<double>(p.k), rows = static_cast<double>(m);
        const double bytes = weights * 4.25 / 8 + 2 * rows * static_cast<double>(p.n + p.k), flop = 2 * rows * weights;
        const double memory_us = bytes / 42.5e3, compute_us = flop / 610e3, percent = 55 + 35 * wobble;
        const double us = std::max(memory_us, compute_us) * 100 / percent;
        data.parameters += m == 1 ? p.n * p.k : 0;
        layer.timings.push_back({m,
                                 us,
                                 bytes / us * 1e-3,
                                 flop / us * 1e-3,
                                 compute_us > memory_us ? Ceiling::f32 : Ceiling::read,
                                 Ceiling::f32,
                                 percent,
                                 {{"OpenBLAS f32", std::max(weights * 4 / 42.5e3, compute_us) * 1.25}}});
      }
      data.layers.push_back(std::move(layer));
    }
  data.bytes_before = static_cast<std::uint64_t>(data.parameters) * 2;
  data.bytes_after = static_cast<std::uint64_t>(data.parameters) * 17 / 32;
  return data;
}

std::size_t occurrences(const std::string& text, const std::string& what) {
  std::size_t count = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

/// Renders and checks the page, and writes it beside the test program for inspection.
std::string rendered(const ReportData& data, const std::string& name) {
  const std::string html = render_report(data);
  EXPECT_EQ(malformed(html), "");
  EXPECT_THAT(html, Not(HasSubstr("nan")));
  EXPECT_THAT(html, Not(HasSubstr("inf\"")));
  EXPECT_THAT(html, Not(HasSubstr("http")));  // self-contained
  EXPECT_THAT(html, Not(HasSubstr("<script")));
  std::ofstream(NIBBLE_BINARY_DIR "/report_" + name + ".html") << html;
  return html;
}

TEST(ReportTest, OneBlock) {
  const std::string html = rendered(model(1), "7");
  EXPECT_THAT(html, HasSubstr("3.76×"));
  EXPECT_THAT(html, HasSubstr("7/7"));
  EXPECT_THAT(html, HasSubstr("memory 42.5 GB/s"));
  EXPECT_THAT(html, HasSubstr(">f32 610 GFLOP/s<"));
  EXPECT_THAT(html, HasSubstr("as fast as OpenBLAS f32"));
  EXPECT_EQ(occurrences(html, "<svg"), 4 + 2 * 4u);  // four pictures, two legends of four marks
}

TEST(ReportTest, ManyLayers) {
  const std::string html = rendered(model(32), "224");
  EXPECT_EQ(occurrences(html, "<tr>"), 224 + 4 + 2u);
  EXPECT_THAT(html, HasSubstr("8 layers</summary>"));  // equal notes appear once
}

/// The same layers in three modes, one of them faster than the peak it is compared with.
ReportData three_modes() {
  ReportData data = model(1);
  data.roofline = {8, 42.5, 610, 1220, 2440};
  const std::vector<ReportLayer> layers = data.layers;
  data.layers.clear();
  const struct {
    const char* mode;
    Ceiling peak;
    double speed;
  } kModes[] = {
      {"u4b8g128 × f32", Ceiling::f32, 1.6}, {"u4b8g128 × bf16", Ceiling::bf16, 1.7}, {"s8r_s8c × f32", Ceiling::int8, 3}};
  for (const auto& mode : kModes)
    for (ReportLayer layer : layers) {
      layer.mode = mode.mode;
      for (ReportTiming& t : layer.timings) {
        t.peak = mode.peak;
        if (t.ceiling == Ceiling::read) continue;
        t.ceiling = mode.peak;
        t.median_us /= mode.speed;
        t.gflops *= mode.speed;
        t.roofline_percent = 100 * t.gflops / data.roofline[mode.peak];
      }
      data.layers.push_back(std::move(layer));
    }
  return data;
}

TEST(ReportTest, MoreThanThePeakIsExplainedWhereItFirstShows) {
  const std::string html = rendered(model(1), "7");
  EXPECT_LT(html.find("More than 100&#160;% is no mistake"), html.find("<table>"));
  EXPECT_NE(html.find("<table>"), std::string::npos);
}

// 1100 pixels less margins, as wide as digits of 13 pixels are with room around them; names of layers and kernels break.
TEST(ReportTest, TheTableOfLayersFits1100Pixels) {
  const ReportData data = model(1);
  const std::string html = rendered(data, "7");
  const std::string table = html.substr(html.find("<div class=\"scroll\">"));
  const std::size_t columns = occurrences(table.substr(0, table.find("</thead>")), "<th");
  EXPECT_EQ(columns - 1, 6 + data.layers[0].timings.size()) << "one for each M, and <thead>";
  EXPECT_LE(11 * 16 + 95 * (columns - 2), 1100u - 40);
}

TEST(ReportTest, EveryModeHasItsCeiling) {
  const std::string html = rendered(three_modes(), "modes");
  for (const char* text :
       {">f32 610 GFLOP/s<", ">bf16 1220 GFLOP/s<", ">int8 2440 Gop/s<", "1220 GFLOP/s in bf16", ">Gop/s</text>"})
    EXPECT_THAT(html, HasSubstr(text));
  EXPECT_EQ(occurrences(html, "class=\"roof\""), 1 + 3u);                  // a slope and three peaks
  EXPECT_EQ(occurrences(html, "<td>s8r_s8c × f32</td>"), 4u);              // a step for each M
  EXPECT_THAT(html, HasSubstr(">u4b8g128 × bf16 ×7</text>"));              // a bar for each mode, of seven layers
  EXPECT_THAT(html, testing::ContainsRegex("1[0-9][0-9] %, of the f32"));  // more than the peak is shown, not cut off
}

TEST(ReportTest, OnlyPeaksThatMatterAreDrawn) {
  ReportData data = model(1);
  data.roofline = {8, 42.5, 610, 1220, 2440};
  const std::string html = rendered(data, "f32");
  EXPECT_THAT(html, Not(HasSubstr(">int8 2440")));
  EXPECT_THAT(html, HasSubstr(">GFLOP/s</text>"));
  data.roofline.int8_gops = 0;  // a peak that was not measured
  for (ReportLayer& layer : data.layers)
    for (ReportTiming& timing : layer.timings) timing.peak = timing.ceiling = Ceiling::int8;
  EXPECT_THAT(rendered(data, "no_peak"), Not(HasSubstr("class=\"roof\"")));
}

TEST(ReportTest, Empty) {
  const std::string html = rendered({}, "empty");
  EXPECT_THAT(html, Not(HasSubstr("<svg")));
  EXPECT_THAT(html, Not(HasSubstr("<table")));
  EXPECT_THAT(html, HasSubstr("How to read this"));
}

TEST(ReportTest, OneLayerAndMissingParts) {
  ReportData data = model(1);
  data.layers.resize(1);
  data.layers[0].name = "fc";
  rendered(data, "1");
  data.layers[0].timings.clear();
  EXPECT_THAT(rendered(data, "untimed"), Not(HasSubstr("<h2>Roofline")));
  data.layers[0].error.reset();
  EXPECT_THAT(rendered(data, "inspect"), Not(HasSubstr("SQNR of the worst")));
  data.layers[0].verify.reset();
  EXPECT_THAT(rendered(data, "bare"), HasSubstr("u4zg128"));

  data = model(2);  // only some layers have each part
  data.roofline = {};
  data.layers[3].timings.resize(1);
  data.layers[4].timings.clear();
  data.layers[5].error.reset();
  data.layers[6].verify.reset();
  data.layers[7].timings[1].baselines_us.clear();
  rendered(data, "gaps");
}

TEST(ReportTest, ExtremeValues) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  ReportData data = model(1);
  data.layers[0].error = QuantError{kInfinity, 1, 0, 0};
  data.layers[1].error = QuantError{-3, 0.1, 1e9, 1.4};
  data.layers[2].error->sqnr_db = std::nan("");
  data.layers[3].verify->passed = false;
  data.layers[3].verify->worst_error_over_bound = kInfinity;
  data.layers[4].verify->worst_error_over_bound = 0;
  data.layers[5].timings[0] = {1, 0, 0, 0, Ceiling::read, Ceiling::f32, 0, {}};
  data.layers[6].timings[0].roofline_percent = 140;
  EXPECT_THAT(rendered(data, "extreme"), HasSubstr("6/7"));
  data.layers.resize(1);
  rendered(data, "exact");
}

TEST(ReportTest, EscapesAllText) {
  const std::string evil = "<script>alert('&\"')</script>";
  ReportData data = model(1);
  data.title = data.date = data.version = data.commit = data.checkpoint = data.device.cpu_name = evil;
  data.formats = {evil};
  data.notes = {{Note::Severity::error, evil}};
  for (ReportLayer& layer : data.layers) {
    layer.name += evil;
    layer.scheme = layer.kernel = evil;
    layer.notes = {{Note::Severity::warning, evil}};
    for (ReportTiming& timing : layer.timings) timing.baselines_us = {{evil, 1.0}};
  }
  rendered(data, "escaped");
}

TEST(ReportText, Numbers) {
  EXPECT_EQ(number(0), "0");
  EXPECT_EQ(number(4.25), "4.25");
  EXPECT_EQ(number(9.996), "10.0");
  EXPECT_EQ(number(99.96), "100");
  EXPECT_EQ(number(123456), "123000");
  EXPECT_EQ(number(-0.012345), "-0.0123");
  EXPECT_EQ(number(std::nan("")), "–");
  EXPECT_EQ(number(std::numeric_limits<double>::infinity()), "∞");
  EXPECT_EQ(duration(999), "999 µs");
  EXPECT_EQ(duration(1234), "1.23 ms");
}

TEST(ReportText, Shortened) {
  EXPECT_EQ(shortened("four", 4), "four");
  EXPECT_EQ(shortened("fives", 4), "fiv…");
  EXPECT_EQ(shortened("ééééé", 3), "éé…");
}

TEST(ReportText, Ticks) {
  EXPECT_EQ((Axis{0, 100, false, 0, 660}).ticks(), (std::vector<double>{0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100}));
  EXPECT_THAT((Axis{0.9, 11, true, 0, 400}).ticks(), testing::ElementsAre(1, 2, 5, 10));
  EXPECT_THAT((Axis{1e-6, 1, true, 0, 200}).ticks().size(), testing::Le(4u));
}

}  // namespace
}  // namespace nibble::cli
