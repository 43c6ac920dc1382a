// SPDX-License-Identifier: Apache-2.0
// Misuses that sharding finds late or cannot prevent: each is a sentence, or does what
// fully_shard.h says, and none crashes or hangs.
#include <optional>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/embedding.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <weft/training.h>

#include "two_ranks.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;

// The text of the Caller error that the call throws.
std::string refusal_of(const std::function<void()>& call) {
  const Error error = error_of(call);
  EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
  return error.text();
}

// The text of any exception that the call throws, which is libtorch's own.
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

torch::nn::Linear up_of(const nn::Sequential& net, std::size_t block = 0) {
  return std::dynamic_pointer_cast<BlockImpl>(net->ptr(block))->up;
}

template <class Sharded>
void train_once(Sharded& sharded, const ProcessGroup& group, int which = 0) {
  sharded(batch_of(group, which)).square().mean().backward();
}

template <class Optimizer, class Options>
void expect_refusal_of_earlier(const Options& options) {
  on_two_ranks([&](ProcessGroup& group) {
    auto net = filled_blocks(2);
    Optimizer earlier(net->parameters(), options);
    FullyShardedDataParallel sharded(net, group);
    const auto before = whole(*net);
    train_once(sharded, group);
    EXPECT_THAT(refusal_of([&] { earlier.step(); }),
                AllOf(HasSubstr("parameter '0.up.weight' is sharded"),
                      HasSubstr("make optimizers of model->parameters()")));
    EXPECT_THAT(refusal_of([&] { earlier.zero_grad(); }),
                HasSubstr("make optimizers of model->parameters(), after sharding"));
    EXPECT_TRUE(are_equal(whole(*net), before));
    // One that is made now trains.
    Optimizer optimizer(net->parameters(), options);
    optimizer.step();
    EXPECT_FALSE(are_equal(whole(*net), before));
  });
}

TEST(ShardedRestrictions, AnOptimizerMadeBeforeIsRefused) {
  expect_refusal_of_earlier<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_refusal_of_earlier<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  expect_refusal_of_earlier<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
  expect_refusal_of_earlier<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1).weight_decay(0));
  expect_refusal_of_earlier<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1));
  expect_refusal_of_earlier<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1));
  expect_refusal_of_earlier<FusedAdamW>(torch::optim::AdamWOptions(0.1));
}

TEST(ShardedRestrictions, AnOptimizerOfTheMembersIsRefused) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(1);
    FullyShardedDataParallel sharded(net, group);
    const std::vector<torch::Tensor> members = {up_of(net)->weight};
    EXPECT_THAT(text_of([&] { torch::optim::SGD(members, torch::optim::SGDOptions(0.1)); }),
                HasSubstr("non-leaf"));
  });
}

TEST(ShardedRestrictions, GradientsOfMembersSayWhereTheyAre) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(1);
    FullyShardedDataParallel sharded(net, group);
    train_once(sharded, group);
    EXPECT_THAT(refusal_of([&] { up_of(net)->weight.grad().norm(); }),
                HasSubstr("is not in the .grad of the module's member but in that of its shard"));
    EXPECT_THAT(text_of([&] { up_of(net)->weight.grad().data_ptr<float>(); }),
                HasSubstr("'0.up.weight'"));
    EXPECT_TRUE(net->parameters()[0].grad().defined());
  });
}

TEST(ShardedRestrictions, RequiresGradOfAMemberIsRefused) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(1);
    up_of(net)->bias.requires_grad_(false);
    FullyShardedDataParallel sharded(net, group);
    EXPECT_THAT(text_of([&] { up_of(net)->weight.requires_grad_(false); }),
                HasSubstr("leaf variables"));
    up_of(net)->bias.requires_grad_(true);
    EXPECT_THAT(refusal_of([&] { train_once(sharded, group); }),
                HasSubstr("requires_grad was switched on for the module's member of parameter "
                          "'0.up.bias'"));
    up_of(net)->bias.requires_grad_(false);
    train_once(sharded, group);
  });
}

TEST(ShardedRestrictions, HooksOfMembersAreRefused) {
  const auto hook = [](torch::Tensor gradient) { return gradient; };
  on_two_ranks([&](ProcessGroup& group) {
    auto net = filled_blocks(1);
    const auto number = up_of(net)->weight.register_hook(hook);
    EXPECT_THAT(refusal_of([&] { FullyShardedDataParallel sharded(net, group); }),
                HasSubstr("parameter '0.up.weight' cannot be sharded: it has a hook"));
    up_of(net)->weight.remove_hook(number);
    FullyShardedDataParallel sharded(net, group);
    const auto later = up_of(net)->weight.register_hook(hook);
    EXPECT_THAT(refusal_of([&] { train_once(sharded, group); }),
                HasSubstr("a hook was registered on the module's member of parameter"));
    up_of(net)->weight.remove_hook(later);
    train_once(sharded, group);
  });
}

TEST(ShardedRestrictions, MemoryThatAMemberWasGivenIsRefused) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(2);
    FullyShardedDataParallel sharded(net, group);
    train_once(sharded, group);
    EXPECT_THAT(refusal_of([&] {
                  up_of(net, 1)->weight.set_data(torch::ones({20, 8}));
                }),
                HasSubstr("parameter '1.up.weight' is sharded and was used outside"));
    train_once(sharded, group);
    {
      const FullParameters full(*net);
      up_of(net, 1)->weight.set_data(torch::ones({20, 8}));
    }
    const std::string sentence = "the memory of parameter '1.up.weight' was replaced";
    EXPECT_THAT(refusal_of([&] { train_once(sharded, group); }), HasSubstr(sentence));
    EXPECT_THAT(refusal_of([&] { whole(*net); }), HasSubstr(sentence));
  });
}

// While it is gathered, in a forward that uses it and in one that has not used it yet.
TEST(ShardedRestrictions, MemoryThatForwardGivesAMemberIsRefused) {
  struct OverwritingImpl : nn::Module {
    torch::Tensor forward(torch::Tensor x) {
      if (when == 1) b->up->weight.set_data(torch::ones({20, 8}));
      x = b(a(x));
      if (when == 2) b->up->weight.set_data(torch::ones({20, 8}));
      return x;
    }
    Block a = register_module("a", Block()), b = register_module("b", Block());
    int when = 0;
  };
  for (const int when : {1, 2}) {
    on_two_ranks([&](ProcessGroup& group) {
      auto model = std::make_shared<OverwritingImpl>();
      FullyShardedDataParallel sharded(model, group);
      train_once(sharded, group);
      model->when = when;
      EXPECT_THAT(refusal_of([&] { train_once(sharded, group); }),
                  HasSubstr("the memory of parameter 'b.up.weight' was replaced"));
    });
  }
}

TEST(ShardedRestrictions, TorchLoadIsRefused) {
  on_two_ranks([](ProcessGroup& group) {
    std::stringstream file;
    torch::save(filled_blocks(1), file);
    auto net = filled_blocks(1, 2);
    FullyShardedDataParallel sharded(net, group);
    torch::load(net, file);
    EXPECT_THAT(refusal_of([&] { train_once(sharded, group); }),
                HasSubstr("the shard of parameter '0.up.weight' is now Float [20, 8]"));
  });
}

TEST(ShardedRestrictions, AMoveToWhereItIsChangesNothing) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(2);
    FullyShardedDataParallel sharded(net, group);
    const auto before = whole(*net);
    net->to(torch::kCPU);
    net->to(torch::kFloat);
    train_once(sharded, group);
    EXPECT_TRUE(are_equal(whole(*net), before));
  });
}

TEST(ShardedRestrictions, AnOptimizerOfWholeParametersIsRefusedBehindThem) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(1);
    FullyShardedDataParallel sharded(net, group);
    std::optional<torch::optim::SGD> optimizer;
    {
      const FullParameters full(*net);
      optimizer.emplace(net->parameters(), torch::optim::SGDOptions(0.1));
    }
    train_once(sharded, group);
    const std::string sentence = "the whole parameter '0.up.weight' is that of a";
    EXPECT_THAT(refusal_of([&] { optimizer->step(); }), HasSubstr(sentence));
    EXPECT_THAT(refusal_of([&] { optimizer->zero_grad(); }), HasSubstr(sentence));
  });
}

// As fully_shard.h says: libtorch copies what model->parameters() has.
TEST(ShardedRestrictions, ACloneHasCopiesOfTheShards) {
  on_two_ranks([](ProcessGroup& group) {
    nn::Sequential net(nn::Linear(8, 8), nn::Linear(8, 6));
    fill_values(*net);
    FullyShardedDataParallel sharded(net, group);
    const auto clone = [&] { return std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone()); };
    const auto copy = clone();
    EXPECT_TRUE(are_equal(copies(copy->parameters()), copies(net->parameters())));
    EXPECT_THAT(text_of([&] { copy->forward(torch::ones({4, 8})); }), HasSubstr("mat1 and mat2"));
    // Neither shares anything with the other.
    const auto before = copies(copy->parameters());
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    train_once(sharded, group);
    optimizer.step();
    EXPECT_TRUE(are_equal(copies(copy->parameters()), before));
    EXPECT_FALSE(are_equal(copies(net->parameters()), before));
    // A whole copy is made of whole parameters.
    const FullParameters full(*net);
    EXPECT_EQ(clone()->forward(torch::ones({4, 8})).size(1), 6);
  });
}

TEST(ShardedRestrictions, RenormalisedAndSparseEmbeddingBagsAreRefused) {
  on_two_ranks([](ProcessGroup& group) {
    const auto wrap = [&](const nn::EmbeddingBagOptions& options) {
      nn::EmbeddingBag bag(options);
      FullyShardedDataParallel sharded(bag, group);
    };
    EXPECT_THAT(
        refusal_of([&] { wrap(nn::EmbeddingBagOptions(8, 4).sparse(true).mode(torch::kSum)); }),
        HasSubstr("sparse gradients"));
    EXPECT_THAT(refusal_of([&] { wrap(nn::EmbeddingBagOptions(8, 4).max_norm(1)); }),
                HasSubstr("max_norm"));
    // An option that is set later.
    nn::Embedding embedding(8, 4);
    FullyShardedDataParallel sharded(embedding, group);
    embedding->options.max_norm(0.1);
    EXPECT_THAT(refusal_of([&] {
                  sharded(torch::tensor({1, 2}));
                }),
                HasSubstr("parameter 'weight' was written in place"));
  });
}

// In a forward an operator gathers the memory; a pointer alone does not.
TEST(ShardedRestrictions, PointersInForwardNeedAnOperatorBefore) {
  struct KernelImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x) {
      const auto values = reads_first ? weight.detach() : weight;
      return x * values.data_ptr<float>()[0] + weight.sum();
    }
    torch::Tensor weight = register_parameter("weight", torch::full({4, 2}, 3.0F));
    bool reads_first = false;
  };
  on_two_ranks([](ProcessGroup& group) {
    auto model = std::make_shared<KernelImpl>();
    FullyShardedDataParallel sharded(model, group);
    EXPECT_THAT(text_of([&] { sharded(torch::ones({1})); }),
                AllOf(HasSubstr("parameter 'weight' is not gathered"), HasSubstr(".detach()")));
    model->reads_first = true;
    EXPECT_EQ(sharded(torch::ones({1})).item<float>(), 27);
  });
}

TEST(ShardedRestrictions, OneRankAloneReadsNoParameterAndTheOthersGoOn) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(2);
    FullyShardedDataParallel sharded(net, group);
    for (int step = 0; step < 3; ++step) {
      if (group.rank() == step % 2) {
        EXPECT_THAT(refusal_of([&] { up_of(net)->weight.sum(); }),
                    HasSubstr("outside of the forward and backward"));
        EXPECT_THAT(refusal_of([&] {
                      net->forward(torch::ones({4, 8}));
                    }),
                    HasSubstr("outside of the forward and backward"));
      }
      train_once(sharded, group, step);
    }
  });
}

TEST(ShardedRestrictions, AParameterThatForwardReturnsIsReadNowhereElse) {
  struct ReturningImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x) { return x.defined() ? x : weight.t(); }
    torch::Tensor weight = register_parameter("weight", torch::ones({4, 2}));
  };
  on_two_ranks([](ProcessGroup& group) {
    auto model = std::make_shared<ReturningImpl>();
    FullyShardedDataParallel sharded(model, group);
    const torch::Tensor returned = sharded(torch::Tensor());
    EXPECT_THAT(refusal_of([&] { returned.sum(); }),
                HasSubstr("parameter 'weight' is sharded and was used outside"));
  });
}

TEST(ShardedRestrictions, TensorsWithCommonMemoryAreRefused) {
  struct AliasedImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x) { return x * a * b; }
    torch::Tensor a = register_parameter("a", torch::ones({4}));
    torch::Tensor b = register_parameter("b", a.detach());
  };
  on_two_ranks([](ProcessGroup& group) {
    EXPECT_THAT(refusal_of([&] {
                  FullyShardedDataParallel sharded(std::make_shared<AliasedImpl>(), group);
                }),
                HasSubstr("parameter 'b' cannot be sharded: it has memory in common with "
                          "parameter 'a'"));
  });
}

TEST(ShardedRestrictions, ARefusalOfOneRankIsThrownOnAll) {
  on_two_ranks([](ProcessGroup& group) {
    const bool is_sparse = group.rank() == 1;
    nn::Embedding embedding(nn::EmbeddingOptions(8, 4).sparse(is_sparse));
    EXPECT_THAT(refusal_of([&] { FullyShardedDataParallel sharded(embedding, group); }),
                HasSubstr("sparse gradients"));
    EXPECT_THAT(refusal_of([&] { fully_shard(embedding, group); }), HasSubstr("sparse gradients"));
    // A rank whose predicate throws.
    const auto units = [&](const std::string&, const nn::Module&) -> bool {
      if (group.rank() == 0) throw std::runtime_error("no such block");
      return true;
    };
    EXPECT_THAT(
        refusal_of([&] { FullyShardedDataParallel sharded(blocks(1), group, {.units = units}); }),
        HasSubstr("no such block"));
  });
}

// Its parameters are shells then, so it is of no use; but it may live on.
TEST(ShardedRestrictions, AnEarlierDistributedDataParallelIsRefused) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(2);
    DistributedDataParallel ddp(net, group);
    ddp(batch_of(group, 0)).sum().backward();
    FullyShardedDataParallel sharded(net, group);
    train_once(sharded, group);
    EXPECT_THAT(text_of([&] { ddp(batch_of(group, 0)); }), HasSubstr("0.up.weight"));
    train_once(sharded, group);
  });
}

TEST(ShardedRestrictions, AModelIsWrappedAgainOnceItsWrapperIsGone) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(2);
    auto reference = filled_blocks(2);
    torch::optim::SGD plain(reference->parameters(), torch::optim::SGDOptions(0.1));
    DistributedDataParallel ddp(reference, group);
    std::unique_ptr<torch::optim::SGD> optimizer;
    for (int step = 0; step < 3; ++step) {
      FullyShardedDataParallel sharded(net, group);
      if (!optimizer) {
        optimizer =
            std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.1));
      }
      for (auto* const one : {optimizer.get(), &plain}) one->zero_grad();
      train_once(sharded, group, step);
      train_once(ddp, group, step);
      for (auto* const one : {optimizer.get(), &plain}) one->step();
    }
    EXPECT_TRUE(are_equal(whole(*net), copies(reference->parameters())));
  });
}

}  // namespace
}  // namespace weft::testing
