// SPDX-License-Identifier: Apache-2.0
// load_safetensors(): models from safetensors files that others have written.
#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <weft/engine/checkpoint/safetensors.h>
#include <weft/tests/harness/folder.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Named = std::map<std::string, torch::Tensor>;
namespace nn = torch::nn;

// Writes a file as Python's safetensors does: without names of slices.
void put_safetensors(const std::string& file, const Named& tensors) {
  checkpoint::Header header;
  for (const auto& [name, tensor] : tensors) {
    header.slices.push_back({name, tensor.scalar_type(), tensor.sizes().vec(),
                             std::vector<std::int64_t>(tensor.dim()), 0, 0});
    header.slices.back().bytes = tensor.nbytes();
  }
  std::string data(checkpoint::lay_out(header.slices), '\0');
  for (const auto& slice : header.slices)
    std::memcpy(data.data() + slice.begin, tensors.at(slice.name).const_data_ptr(), slice.bytes);
  put(file, checkpoint::encode(header) + data);
}

torch::Tensor counted(at::IntArrayRef shape, torch::Dtype dtype = torch::kFloat) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) elements *= size;
  return torch::arange(elements, torch::kFloat).reshape(shape).to(dtype);
}

// Two files and an index, as Hugging Face's repositories have them.
class Pretrained : public ::testing::Test {
 protected:
  Pretrained() {
    put_safetensors(path_ + "/model-00001-of-00002.safetensors",
                    {{"model.0.weight", counted({7, 4}, torch::kBFloat16)}});
    put_safetensors(path_ + "/model-00002-of-00002.safetensors",
                    {{"model.0.bias", counted({7})}, {"model.1.weight", counted({3, 7})}});
    put_safetensors(path_ + "/consolidated.safetensors", {{"model.0.weight", counted({1})}});
    put(path_ + "/model.safetensors.index.json", R"({"metadata": {"total_size": 1}, "weight_map": {
        "model.0.weight": "model-00001-of-00002.safetensors",
        "model.0.bias": "model-00002-of-00002.safetensors",
        "model.1.weight": "model-00002-of-00002.safetensors"}})");
  }
  static nn::Sequential net() {
    return nn::Sequential(nn::Linear(4, 7), nn::Linear(nn::LinearOptions(7, 3).bias(false)));
  }
  static std::vector<torch::Tensor> expected() {
    return {counted({7, 4}), counted({7}), counted({3, 7})};
  }
  static std::string named(const std::string& name) { return "model." + name; }
  std::string refusal(ProcessGroup& group, nn::Module& module,
                      const checkpoint::SafetensorsOptions& options = {.name_in_file = &named}) {
    return refused(group, Blame::Caller,
                   [&] { checkpoint::load_safetensors(path_, group, module, options); });
  }

  const harness::Folder temporary_;
  const std::string path_ = temporary_.path();
};

TEST_F(Pretrained, PlainModelLoadsByTheIndex) {
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    for (const std::string file : {"", "/model.safetensors.index.json"}) {
      auto model = net();
      checkpoint::load_safetensors(path_ + file, group, *model, {.name_in_file = &named});
      expect_equal(model->parameters(), expected());
    }
  });
}

TEST_F(Pretrained, ShardedModelLoadsItsRows) {
  for (const int ranks : {2, 3}) {
    harness::run_ranks(harness::As::Threads, ranks, [&](ProcessGroup group) {
      auto model = net();
      const FullyShardedDataParallel sharded(model, group);
      checkpoint::load_safetensors(path_, group, *model, {.name_in_file = &named});
      const FullParameters full(*model);
      expect_equal(model->parameters(), expected());
    });
  }
}

TEST_F(Pretrained, OneFileLoads) {
  put_safetensors(path_ + "/one.safetensors", {{"weight", counted({2, 3})}});
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    auto model = nn::Linear(nn::LinearOptions(3, 2).bias(false));
    checkpoint::load_safetensors(path_ + "/one.safetensors", group, *model);
    expect_equal(model->parameters(), {counted({2, 3})});
  });
}

struct TiedImpl : nn::Module {
  nn::Embedding embedding = register_module("embedding", nn::Embedding(5, 4));
  torch::Tensor last = register_parameter("last", embedding->weight);
};
TORCH_MODULE(Tied);

// Language models write the weight that their embedding and their last layer share once.
TEST_F(Pretrained, SharedTensorIsThereOnce) {
  put_safetensors(path_ + "/tied.safetensors", {{"embedding.weight", counted({5, 4})}});
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    Tied model;
    checkpoint::load_safetensors(path_ + "/tied.safetensors", group, *model);
    EXPECT_TRUE(torch::equal(model->last, counted({5, 4})));
  });
}

TEST_F(Pretrained, MisfitsAreListedAndChangeNothing) {
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    auto model = nn::Sequential(nn::Linear(4, group.rank() == 0 ? 7 : 8), nn::Linear(7, 3));
    const auto before = values_of(*model);
    EXPECT_THAT(refusal(group, *model),
                AllOf(HasSubstr("'" + path_ +
                                "' does not fit the module on rank 0, and nothing "
                                "was loaded: the files do not have: '1.bias'. "),
                      Not(HasSubstr("the module does not have"))));
    EXPECT_THAT(refusal(group, *model, {}),
                HasSubstr("the files do not have: '0.weight', '0.bias', '1.weight', '1.bias'; the "
                          "module does not have: 'model.0.bias', 'model.0.weight', "
                          "'model.1.weight'. SafetensorsOptions::name_in_file maps names"));
    const auto without_bias = [](const std::string& name) {
      return name == "1.bias" ? "" : "model." + name;
    };
    EXPECT_THAT(refusal(group, *model, {.name_in_file = without_bias}),
                HasSubstr("on rank 1, and nothing was loaded: these differ: '0.weight' (BFloat16 "
                          "[7, 4] in the file, Float [8, 4] here), '0.bias' (Float [7] in the "
                          "file, Float [8] here)"));
    expect_equal(values_of(*model), before);
  });
}

TEST_F(Pretrained, APartLoads) {
  harness::run_ranks(harness::As::Threads, 1, [&](ProcessGroup group) {
    auto model = nn::Sequential(nn::Linear(4, 7), nn::Linear(7, 2));
    const auto before = values_of(*model);
    checkpoint::load_safetensors(
        path_, group, *model,
        {.name_in_file =
             [](const std::string& name) { return name[0] == '1' ? "" : "model." + name; },
         .use_all = false});
    expect_equal(model->parameters(), {counted({7, 4}), counted({7}), before[2], before[3]});
  });
}

TEST_F(Pretrained, DamageIsNamed) {
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    auto model = net();
    const std::string index = path_ + "/model.safetensors.index.json";
    if (group.rank() == 0)
      put(index, R"({"weight_map": {"model.0.scale": "model-00001-of-00002.safetensors"}})");
    harness::meet(group);
    EXPECT_THAT(refusal(group, *model),
                HasSubstr("the index '" + index +
                          "' cannot be loaded: 'model-00001-of-00002."
                          "safetensors' does not have 'model.0.scale', which it names"));
    if (group.rank() == 0) put(index, R"({"weight_map": {"model.0.scale": "../x"}})");
    harness::meet(group);
    EXPECT_THAT(refusal(group, *model), HasSubstr("it names no file for 'model.0.scale'"));
    if (group.rank() == 0) put(index, "{");
    harness::meet(group);
    EXPECT_THAT(refusal(group, *model), HasSubstr("its JSON is damaged"));
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] { checkpoint::load_safetensors(path_ + "/none", group, *model); }),
                HasSubstr("none' is missing"));
  });
}

}  // namespace
}  // namespace weft::testing
