// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/torch.h>

namespace gpt {

// A text as numbers: its first nine tenths for training, the others for evaluation.
struct Text {
  std::string characters;     // the different characters of the text, in order
  torch::Tensor train, test;  // int64 [examples, context + 1]: all stretches of that length

  Text(const std::string& file, std::int64_t context) {
    std::ifstream stream(file);
    std::ostringstream content;
    content << stream.rdbuf();
    const std::string text = content.str();
    const auto size = static_cast<std::int64_t>(text.size());
    if (!stream || size / 10 <= context)
      throw std::runtime_error("--text: '" + file + "' cannot be read, or has fewer than " +
                               std::to_string(10 * (context + 1)) +
                               " characters, ten times those that the model sees at once");
    const std::set<char> known(text.begin(), text.end());
    characters.assign(known.begin(), known.end());
    const torch::Tensor all = numbers(text);
    train = all.narrow(0, 0, size - size / 10).unfold(0, context + 1, 1);
    test = all.narrow(0, size - size / 10, size / 10).unfold(0, context + 1, 1);
  }
  torch::Tensor numbers(const std::string& text) const {
    std::vector<std::int64_t> found;
    for (const char one : text) found.push_back(static_cast<std::int64_t>(characters.find(one)));
    return torch::tensor(found);
  }
};

}  // namespace gpt
