// The inside of a Checkpoint, shared by reading and transforming.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/config/format.hpp"
#include "checkpoint/config/model_config.hpp"
#include "checkpoint/file_codes.hpp"
#include "checkpoint/io/shards.hpp"
#include "nibble/checkpoint.hpp"

namespace nibble {

struct Checkpoint::Impl {
  /// The tensors that share a module name: every tensor is in exactly one such group. Or those of an expert, which is an element of the
  /// tensors of such a group (stacks.hpp).
  struct Group {
    struct Stack {
      std::string name;               // of the group with the tensors
      std::int64_t expert = 0;        // the element, of the first dimension
      std::size_t matrix_length = 0;  // of a tensor's name, whose rest says which of the matrix it is: "_blocks"
      bool transposed = false;        // weights are [K,N]
    };
    std::string name;
    std::vector<std::size_t> tensors;  // indices
    std::optional<Stack> stack = {};
  };

  static Result<std::shared_ptr<const Impl>> open(const std::filesystem::path& path);

  ConstTensorView view(std::size_t tensor) const;
  /// A tensor of the group: the whole, or the expert's element.
  ConstTensorView view(const Group& group, std::size_t tensor) const;
  /// The name of a tensor inside of the group's module.
  std::string_view suffix(const Group& group, std::size_t tensor) const;
  /// The bytes of the tensor that the group has, and the first of them.
  std::uint64_t bytes(const Group& group, std::size_t tensor) const;
  std::uint64_t first_byte(const Group& group, std::size_t tensor) const;
  codec::ModuleTensors module_tensors(const Group& group) const;
  /// The same for a tensor whose bytes are read into `memory`.
  /// but: one that is left out.
  Result<codec::ModuleTensors> load_module(const Group& group, std::vector<Tensor>& memory, std::string_view but = {}) const;
  /// What a part of the module needs.
  Result<codec::ModuleTensors> load_part(const Module& module, const codec::Format& format, const LayerPart& part,
                                         std::vector<Tensor>& memory) const;
  const Module* find_module(std::string_view module_name) const;
  /// All of a module, or a part of it.
  Result<QuantTensor> read(const Module& module, const LayerPart* part, std::vector<Note>* notes) const;
  /// All of a module but its codes, which are read by blocks; nullopt where only read() has them. Findings are those of read(), but
  /// for the codes' (add_nan_note).
  Result<std::optional<OpenModule>> open_module(const Module& module, std::vector<Note>* notes) const;
  Result<std::string> digest(const Module& module) const;

  std::filesystem::path path;
  storage::Shards shards;
  storage::ModelConfig config;
  std::vector<Group> groups;
  std::vector<Module> modules;
  std::vector<Note> notes;
  std::vector<Status> broken;  // modules that a format recognised but found damaged or unsupported: no Module, and no transform
  std::unordered_map<std::string_view, std::size_t> tensor_index, group_index, module_index;
  std::uint64_t config_digest = 0;  // of the quantization config

 private:
  /// The module of that name and format, as this checkpoint has it, and its format.
  struct Found {
    const Module& module;
    const codec::Format& format;
  };
  Result<Found> find(const Module& module) const;
  void group_tensors();
  void detect_modules();
  void compare_with_config();
};

/// Notes weights that are NaN.
void add_nan_note(const QuantTensor& q, const FileCodes::Nans& nans, std::vector<Note>& notes);

}  // namespace nibble
