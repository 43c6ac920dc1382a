// SPDX-License-Identifier: Apache-2.0
// The copy that one thread makes while another writes it.
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/engine/checkpoint/share_copy.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

using checkpoint::Share;
using checkpoint::ShareCopy;
using ::testing::HasSubstr;

Share share_of(const std::vector<at::Tensor>& tensors) {
  std::vector<checkpoint::Value> values;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    values.push_back({"value" + std::to_string(i), tensors[i], "", checkpoint::Writer::First, {}});
  return checkpoint::share_of(values, 0, 1);
}

TEST(ShareCopies, WriterFollowsTheCopy) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 9; ++i) tensors.push_back(at::full({5 << 20}, i, at::kByte));
  tensors.push_back(at::empty({0}, at::kByte));
  tensors.push_back(at::ones({100, 100}).t());
  ShareCopy copy(share_of(tensors));
  std::thread writer([&] {
    const auto* const data = static_cast<const char*>(copy.data());
    for (const auto& [slice, checksums, kind] : copy.slices()) {
      copy.wait_for(slice.begin + slice.bytes);
      const auto index = std::stoul(slice.name.substr(5));
      const at::Tensor expected = tensors[index].contiguous();
      EXPECT_EQ(std::memcmp(data + slice.begin, expected.const_data_ptr(), slice.bytes), 0);
    }
  });
  copy.run();
  writer.join();
  copy.wait_for(copy.bytes());
  EXPECT_GE(copy.take_memory().nbytes(), copy.bytes());
}

TEST(ShareCopies, FailureReachesTheWriter) {
  const at::Tensor nowhere = at::empty({40 << 20}, at::TensorOptions(at::kByte).device(at::kMeta));
  ShareCopy copy(share_of({at::ones({5}), nowhere}));
  std::optional<Error> failure;
  std::thread writer([&] { failure = harness::error_of([&] { copy.wait_for(copy.bytes()); }); });
  copy.run();
  writer.join();
  ASSERT_TRUE(failure);
  EXPECT_THAT(failure->text(), HasSubstr("meta tensor"));
}

}  // namespace
}  // namespace weft::testing
