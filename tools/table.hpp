// Text for terminals: aligned tables, display widths, colour.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace nibble::tools {

enum class Style { plain, bold, dim, good, warn, bad };

/// True when `stream` is a terminal that wants colour: NO_COLOR is unset and TERM is not "dumb".
bool wants_colour(std::FILE* stream);
/// `text` between the escape codes of `style`, or as it is when `colour` is false.
std::string styled(std::string_view text, Style style, bool colour);

/// How many terminal columns UTF-8 text takes: 2 for wide East Asian characters and emoji, 0 for combining marks.
int display_width(std::string_view text);
/// `text` with control characters replaced by '?': names come from files, and a file must not be able to drive the terminal.
std::string printable(std::string_view text);

struct Cell {
  std::string text;
  Style style = Style::plain;

  Cell(std::string t, Style s = Style::plain) : text(std::move(t)), style(s) {}  // NOLINT(google-explicit-constructor)
  Cell(const char* t) : text(t) {}                                               // NOLINT(google-explicit-constructor)
};

class Table {
 public:
  enum class Align { left, right };
  struct Column {
    std::string title;
    Align align = Align::left;
    bool fold = false;  // when all rows agree, say it once below the table
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  /// Missing cells at the end are empty.
  void add(std::vector<Cell> cells) { rows_.push_back(std::move(cells)); }
  /// A header line, the rows and a blank line; columns whose cells are all empty are left out. Nothing without rows.
  std::string render(bool colour) const;

 private:
  bool folds(std::size_t column) const;

  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace nibble::tools
