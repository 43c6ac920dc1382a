// SPDX-License-Identifier: Apache-2.0
// The images: the digits that ship with this example, or MNIST's four files.
#pragma once

#include <string>

#include <torch/torch.h>

namespace digits {

struct Images {
  torch::Tensor pixels;  // float [images, 1, height, width], 0 … 1
  torch::Tensor labels;  // int64 [images]
  std::int64_t count() const { return labels.size(0); }
};

struct Dataset {
  Images train;
  Images test;
};

// Reads a CSV of 65 integers a line, plain or gzipped. A fixed fifth (the same for every seed) is
// kept for testing. Throws std::runtime_error that names the file and line.
Dataset load_digits(const std::string& file);

// Reads {train-images,t10k-images}-idx3-ubyte and {train-labels,t10k-labels}-idx1-ubyte from the
// folder, plain or with .gz.
Dataset load_mnist(const std::string& folder);

}  // namespace digits
