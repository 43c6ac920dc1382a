// SPDX-License-Identifier: Apache-2.0
// An optimizer's options in messages, in the form in which libtorch saves them.
#pragma once

#include <string>
#include <type_traits>

#include <torch/optim/optimizer.h>

#include <weft/base/export.h>
#include <weft/engine/codec/values.h>

namespace weft::optim {

WEFT_API std::string saved(const torch::optim::OptimizerOptions& options);
// Throws Caller if saved() did not make `text` from options of the same type.
WEFT_API void load(torch::optim::OptimizerOptions& options, const std::string& text);
WEFT_API std::string saved(const torch::optim::Optimizer& optimizer);
WEFT_API void load(torch::optim::Optimizer& optimizer, const std::string& text);

template <class Options>
struct OptionsOnWire {
  std::string text;
  Options options() const {
    static_assert(std::is_base_of_v<torch::optim::OptimizerOptions, Options>,
                  "options of a libtorch optimizer, such as torch::optim::SGDOptions(0.05)");
    if constexpr (std::is_default_constructible_v<Options>) {
      Options options;
      load(options, text);
      return options;
    } else {
      static_assert(std::is_constructible_v<Options, double>,
                    "options must be constructible without arguments or from a learning rate");
      Options options(1.0);
      load(options, text);
      return options;
    }
  }
  WEFT_FIELDS(text)
};

}  // namespace weft::optim
