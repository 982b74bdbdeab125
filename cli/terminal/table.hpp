// Text for terminals: aligned tables, display widths, colour.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace nibble::cli {

enum class Style { plain, bold, dim, good, warn, bad };

/// True when `stream` is a terminal that wants colour: NO_COLOR is unset and TERM is not "dumb".
bool wants_colour(std::FILE* stream);
/// `text` between the escape codes of `style`, or as it is when `colour` is false.
std::string styled(std::string_view text, Style style, bool colour);

/// How many terminal columns UTF-8 text takes: 2 for wide East Asian characters and emoji, 0 for combining marks.
int display_width(std::string_view text);
/// How many columns standard output has: those of the terminal, or of COLUMNS; 0, unlimited, where there is neither.
int output_columns();
/// `text`, which begins at `column`, broken between words into lines of at most `columns`; later lines begin at `indent`. `columns` of 0
/// breaks nothing.
std::string wrapped(std::string_view text, int columns, int indent, int column = 0);
/// Breaks the long lines of a text likewise, except lines laid out with spaces and coloured ones.
std::string fitted(std::string_view text, int columns = output_columns());
/// `text` with control characters replaced by '?': names come from files, which must not control the terminal.
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
    bool fold = false;  // when all rows agree, print the value once below the table
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  /// Missing cells at the end are empty.
  void add(std::vector<Cell> cells) { rows_.push_back(std::move(cells)); }
  /// A header line, the rows and a blank line; columns whose cells are all empty are left out. Nothing without rows. A table wider than
  /// `columns` becomes a paragraph for each row: its first cell, then titles and values.
  std::string render(bool colour, int columns = output_columns()) const;

 private:
  bool folds(std::size_t column) const;
  std::string paragraphs(bool colour, int columns, const std::vector<int>& widths) const;

  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace nibble::cli
