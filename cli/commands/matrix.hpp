// What this build can do with which weights on which machines: every cell is the planner's answer.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nibble/nibble.hpp"
#include "terminal/output.hpp"

namespace nibble::cli {

/// Questions × weights × machines.
struct SupportMatrix {
  struct Column {
    std::string name, about;  // "avx2"; what it stands for
  };
  struct Question {
    std::string operation, name, about;           // "linear"; "f16→s8r"; what the activations are
    std::vector<std::vector<std::size_t>> cells;  // [weight][machine]: which of the answers
  };
  std::vector<Column> machines;
  std::vector<std::string> weights;  // "u4b8g128", "u4zg128 act-order"
  std::vector<Question> questions;
  std::vector<std::string> answers;  // "fast", "generic", "reference", or why not: "no: …"
};

/// The same for readers: a table for the machines that answer alike, in it a column for activations and a row for weights that do.
struct SupportTables {
  struct Row {
    std::string weights;  // "u4{b8,z}g{128,64}, s8c prescale"
    std::vector<std::string> cells;
  };
  struct Table {
    std::string operation;
    std::vector<std::string> machines, columns;  // no columns, one cell: nothing runs
    std::vector<Row> rows;
  };
  std::vector<Table> tables;
  std::vector<std::string> refusals;  // "no (1)" is for the first of them
};

/// Asks the planner, without packing anything. Errors: of a table in here that is wrong.
Result<SupportMatrix> support_matrix();

/// The one of a planner's reasons that says most: that of most kernels of a layout that holds the weight, or of the first layout if none
/// does. level: what a better machine ran, and this one lacks; absent: it is not the machine.
std::string reason_of(const Status& refused, std::optional<Isa> level = {});

/// Of a machine that runs nothing, the first refusal.
SupportTables tables_of(const SupportMatrix& matrix);
std::string matrix_text(const SupportMatrix& matrix, bool colour);
Json matrix_json(const SupportMatrix& matrix);

}  // namespace nibble::cli
