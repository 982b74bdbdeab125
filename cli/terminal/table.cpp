// Column widths are computed from all rows first, so tables are rendered when they are complete.
#include "terminal/table.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace nibble::cli {
namespace {

// Decodes the character at `at` and moves past it; a stray byte counts as one character.
char32_t next_character(std::string_view text, std::size_t& at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(at++);
  const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : lead >= 0xc0 ? 1 : 0;
  char32_t character = more == 0 ? lead : lead & (0x3fu >> more);
  for (int i = 0; i < more && at < text.size() && (byte(at) & 0xc0) == 0x80; ++i)
    character = character << 6 | (byte(at++) & 0x3fu);
  return character;
}

struct Range {
  char32_t first, last;
};
constexpr Range kCombining[] = {{0x300, 0x36f}, {0x200b, 0x200f}, {0x20d0, 0x20ff}, {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f}};
constexpr Range kWide[] = {{0x1100, 0x115f},   {0x2e80, 0xa4cf},   {0xac00, 0xd7a3},  {0xf900, 0xfaff},
                           {0xfe30, 0xfe6f},   {0xff00, 0xff60},   {0xffe0, 0xffe6},  {0x1f300, 0x1f64f},
                           {0x1f680, 0x1f6ff}, {0x1f900, 0x1faff}, {0x20000, 0x3fffd}};

bool in(char32_t c, const auto& ranges) {
  return std::any_of(std::begin(ranges), std::end(ranges), [c](Range r) { return r.first <= c && c <= r.last; });
}

std::string_view escape_code(Style style) {
  switch (style) {
    case Style::plain: return "";
    case Style::bold: return "\033[1m";
    case Style::dim: return "\033[2m";
    case Style::good: return "\033[32m";
    case Style::warn: return "\033[33m";
    case Style::bad: return "\033[31m";
  }
  return "";
}

}  // namespace

bool wants_colour(std::FILE* stream) {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  return isatty(fileno(stream)) != 0 && (no_color == nullptr || *no_color == '\0') && term != nullptr &&
         std::string_view(term) != "dumb";
}

std::string styled(std::string_view text, Style style, bool colour) {
  if (!colour || style == Style::plain || text.empty()) return std::string(text);
  return std::string(escape_code(style)).append(text).append("\033[0m");
}

int output_columns() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  const char* columns = std::getenv("COLUMNS");
  return columns == nullptr ? 0 : std::max(0, std::atoi(columns));
}

std::string wrapped(std::string_view text, int columns, int indent, int column) {
  if (columns <= 0) return std::string(text);
  std::string out;
  bool fresh = column <= indent;  // nothing but the indent is on this line
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    const int width = display_width(word);
    if (!fresh && column + 1 + width > columns) {
      out += "\n" + std::string(static_cast<std::size_t>(indent), ' ');
      column = indent;
      fresh = true;
    }
    if (!fresh) out += ' ';
    out += word;
    column += width + (fresh ? 0 : 1);
    fresh = false;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

std::string fitted(std::string_view text, int columns) {
  std::string out;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    const std::size_t start = std::min(line.find_first_not_of(' '), line.size());
    const bool laid_out = line.find("  ", start) != line.npos || line.find('\033') != line.npos;
    out += line.substr(0, start);
    const auto indent = static_cast<int>(start);
    out += laid_out ? std::string(line.substr(start)) : wrapped(line.substr(start), columns, indent + 2, indent);
    if (end < text.size()) out += '\n';
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

int display_width(std::string_view text) {
  int width = 0;
  for (std::size_t at = 0; at < text.size();) {
    const char32_t c = next_character(text, at);
    if (!in(c, kCombining)) width += in(c, kWide) ? 2 : 1;
  }
  return width;
}

std::string printable(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t start = at;
    const char32_t c = next_character(text, at);
    const bool stray = at - start == 1 && c >= 0x80;
    if (c < 0x20 || (c >= 0x7f && c < 0xa0) || stray) {
      out += '?';
    } else {
      out += text.substr(start, at - start);
    }
  }
  return out;
}

bool Table::folds(std::size_t column) const {
  const auto text = [column](const auto& row) { return column < row.size() ? row[column].text : std::string(); };
  return columns_[column].fold && rows_.size() > 1 && !text(rows_[0]).empty() &&
         std::all_of(rows_.begin(), rows_.end(), [&](const auto& row) { return text(row) == text(rows_[0]); });
}

std::string Table::paragraphs(bool colour, int columns, const std::vector<int>& widths) const {
  constexpr int kIndent = 2;
  std::string out;
  for (const auto& row : rows_) {
    out += styled(row.front().text, Style::bold, colour) + "\n";
    std::string line;
    int width = kIndent;
    for (std::size_t c = 1; c < std::min(row.size(), columns_.size()); ++c) {
      if (widths[c] == 0 || row[c].text.empty()) continue;
      const std::string title = columns_[c].title + (columns_[c].title.empty() ? "" : " ");
      const int more = display_width(title) + display_width(row[c].text);
      if (!line.empty() && width + 2 + more > columns) {
        out += "  " + line + "\n";
        line.clear();
        width = kIndent;
      }
      if (!line.empty()) line += ", ";
      width += more + (line.empty() ? 0 : 2);
      line += title + styled(row[c].text, row[c].style, colour);
    }
    if (!line.empty()) out += "  " + line + "\n";
  }
  return out;
}

std::string Table::render(bool colour, int columns) const {
  if (rows_.empty()) return "";
  std::vector<int> widths(columns_.size(), 0);  // 0: not shown
  std::string folded;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    if (folds(c)) {
      folded += (folded.empty() ? "all: " : ", ") + columns_[c].title + " " + rows_[0][c].text;
      continue;
    }
    for (const auto& row : rows_) widths[c] = std::max(widths[c], c < row.size() ? display_width(row[c].text) : 0);
    if (widths[c] > 0) widths[c] = std::max(widths[c], display_width(columns_[c].title));
  }
  std::string out;
  const auto line = [&](const std::vector<Cell>& cells) {
    std::string text, gap;  // spaces are written only before the next text: lines have no trailing blanks
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      if (widths[c] == 0) continue;
      const Cell& cell = c < cells.size() ? cells[c] : Cell("");
      const std::string padding(static_cast<std::size_t>(widths[c] - display_width(cell.text)), ' ');
      if (columns_[c].align == Align::right) gap += padding;
      if (!cell.text.empty()) {
        text += gap + styled(cell.text, cell.style, colour);
        gap.clear();
      }
      if (columns_[c].align == Align::left) gap += padding;
      gap += "  ";
    }
    out += text + "\n";
  };
  int width = -2;
  for (const int each : widths) width += each > 0 ? each + 2 : 0;
  if (columns > 0 && width > columns) {
    out = paragraphs(colour, columns, widths);
  } else {
    std::vector<Cell> titles;
    for (const Column& column : columns_) titles.emplace_back(column.title, Style::bold);
    line(titles);
    for (const auto& row : rows_) line(row);
  }
  if (!folded.empty()) out += wrapped(folded, columns, 2) + "\n";
  return out + "\n";
}

}  // namespace nibble::cli
