// SPDX-License-Identifier: Apache-2.0
// Encodes and decodes values and tensors, and compares the results.
#pragma once

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <weft/codec.h>

namespace weft {

template <class T>
T there_and_back(const T& value) {
  return decode<T>(encode(value));
}

template <class T>
void expect_kept(const T& value) {
  EXPECT_EQ(there_and_back(value), value);
}

inline void expect_same(const at::Tensor& got, const at::Tensor& sent) {
  ASSERT_TRUE(got.defined());
  EXPECT_EQ(got.scalar_type(), sent.scalar_type());
  EXPECT_EQ(got.sizes(), sent.sizes());
  EXPECT_EQ(got.layout(), sent.layout());
  EXPECT_EQ(got.requires_grad(), sent.requires_grad());
  if (sent.layout() == at::kStrided) {
    EXPECT_EQ(got.strides(), sent.strides());
  }
  const auto plain = [](const at::Tensor& tensor) {
    at::Tensor dense = tensor.detach();
    if (dense.layout() != at::kStrided) dense = dense.to_dense();
    return dense.is_complex() ? at::view_as_real(dense.to(at::kComplexDouble))
                              : dense.to(at::kDouble);
  };
  EXPECT_TRUE(at::equal(plain(got), plain(sent)));
}

}  // namespace weft
