// SPDX-License-Identifier: Apache-2.0
// Tests DistributedDataParallel inside autograd contexts.
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include <torch/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <weft/optim.h>
#include <weft/parallel.h>
#include <weft/tests/engine/autograd/trainers.h>

namespace hybrid {

using namespace weft;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int width = 3)
      : first(register_module("first", torch::nn::Linear(width, 4))),
        second(register_module("second", torch::nn::Linear(4, 2))) {
    torch::NoGradGuard off;
    for (auto& parameter : parameters())
      parameter.copy_(at::linspace(-0.5, 0.7, parameter.numel()).view(parameter.sizes()));
  }
  at::Tensor forward(at::Tensor x) { return second(first(x).tanh()); }
  torch::nn::Linear first, second;
};
TORCH_MODULE(Net);
// The model's middle is on another worker, whose gradient comes back to the layer before it.
struct SandwichImpl : torch::nn::Module {
  explicit SandwichImpl(std::function<at::Tensor(at::Tensor)> middle)
      : before(register_module("before", torch::nn::Linear(3, 3))),
        after(register_module("after", torch::nn::Linear(3, 2))),
        spare(register_module("spare", torch::nn::Linear(3, 2))),
        middle_(std::move(middle)) {
    torch::NoGradGuard off;
    for (auto& parameter : parameters())
      parameter.copy_(at::linspace(-0.5, 0.7, parameter.numel()).view(parameter.sizes()));
  }
  at::Tensor forward(at::Tensor x, bool uses_spare) {
    const at::Tensor between = middle_(before(x).tanh());
    return uses_spare ? after(between) + spare(x) : after(between);
  }
  torch::nn::Linear before, after, spare;

 private:
  std::function<at::Tensor(at::Tensor)> middle_;
};
TORCH_MODULE(Sandwich);
// Two outputs, each with its own weight.
struct HeadsImpl : torch::nn::Module {
  HeadsImpl()
      : a(register_parameter("a", at::ones({3}))), b(register_parameter("b", at::ones({3}))) {}
  std::vector<at::Tensor> forward(double x) { return {a * x, b * (2 * x)}; }
  at::Tensor a, b;
};
TORCH_MODULE(Heads);
// Its backward calls backward() itself.
struct Inner : torch::autograd::Function<Inner> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x,
                            at::Tensor weight) {
    context->save_for_backward({x, weight});
    return x * weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::AutoGradMode with_grad(true);
    const at::Tensor again = saved[0].detach().requires_grad_();
    (again * saved[1]).backward(gradients[0]);
    return {again.grad(), at::Tensor()};
  }
};
struct RecomputedImpl : torch::nn::Module {
  RecomputedImpl() : weight(register_parameter("weight", at::ones({3}))) {}
  at::Tensor forward(at::Tensor x) { return Inner::apply(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Recomputed);
struct WordsImpl : torch::nn::Module {
  explicit WordsImpl(int width = 2)
      : words(register_module(
            "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(6, width).sparse(true)))) {
    torch::NoGradGuard off;
    words->weight.copy_(at::linspace(-1, 1, 6 * width).view({6, width}));
  }
  at::Tensor forward(at::Tensor indices) { return words(indices); }
  torch::nn::Embedding words;
};
TORCH_MODULE(Words);
// An embedding and a layer of another worker, and two layers here, all without biases: a negated
// input gives a negated output.
struct HybridImpl : torch::nn::Module {
  HybridImpl(RRef<Words> remote_words, RRef<Layer> remote_layer, ProcessGroup* inner_group)
      : inner(register_module("inner",
                              torch::nn::Linear(torch::nn::LinearOptions(3, 3).bias(false)))),
        outer(register_module("outer",
                              torch::nn::Linear(torch::nn::LinearOptions(3, 1).bias(false)))),
        words_(std::move(remote_words)),
        layer_(std::move(remote_layer)) {
    torch::NoGradGuard off;
    inner->weight.copy_(at::eye(3));
    outer->weight.fill_(1);
    if (inner_group != nullptr) ddp_.emplace(inner, *inner_group);
  }
  at::Tensor forward(at::Tensor indices);
  torch::nn::Linear inner, outer;

 private:
  RRef<Words> words_;
  RRef<Layer> layer_;
  std::optional<DistributedDataParallel<torch::nn::LinearImpl>> ddp_;
};
TORCH_MODULE(Hybrid);
enum class Averaged { Nothing, Inner, All };
// Each trainer's group, for the calls of the master.
std::mutex groups_mutex;
std::map<int, ProcessGroup*> groups;
// Returns, for each round, how many elements of the gradients of the inner, the outer and the
// remote layer and of the embedding are not zero.
std::vector<std::vector<std::int64_t>> train_as_told(RRef<Words> words, RRef<Layer> layer,
                                                     int averaged, int rounds);

Words negated_words() {
  Words words(3);
  torch::NoGradGuard off;
  words->words->weight[1].copy_(-words->words->weight[0]);
  return words;
}
at::Tensor words_forward(Words& words, at::Tensor indices) { return words(indices); }
at::Tensor words_gradient(Words& words) {
  return AutogradContext::current().gradient(words->words->weight).to_dense();
}
at::Tensor HybridImpl::forward(at::Tensor indices) {
  const at::Tensor x = layer_.sync<&Layer::forward>(words_.sync<&words_forward>(indices));
  return outer(ddp_ ? (*ddp_)(x) : inner(x));
}
std::vector<std::vector<std::int64_t>> train_as_told(RRef<Words> words, RRef<Layer> layer,
                                                     int averaged, int rounds) {
  rpc::Agent& agent = rpc::this_agent();
  ProcessGroup* group = nullptr;
  {
    std::lock_guard lock(groups_mutex);
    group = groups.at(agent.self().rank);
  }
  Hybrid model(words, layer, averaged == static_cast<int>(Averaged::Inner) ? group : nullptr);
  std::optional<DistributedDataParallel<HybridImpl>> ddp;
  if (averaged == static_cast<int>(Averaged::All)) ddp.emplace(model, *group);
  std::vector<std::vector<std::int64_t>> found;
  for (int round = 0; round < rounds; ++round) {
    AutogradContext context(agent);
    const auto indices = at::full({2}, agent.self().rank % 2, at::kLong);
    context.backward({(ddp ? (*ddp)(indices) : model(indices)).sum()});
    std::vector<std::int64_t> numbers;
    for (const at::Tensor& gradient :
         {context.gradient(model->inner->weight), context.gradient(model->outer->weight),
          layer.sync<&Layer::gradient>(), words.sync<&words_gradient>()}) {
      numbers.push_back(at::count_nonzero(gradient).item<std::int64_t>());
    }
    found.push_back(numbers);
  }
  return found;
}

}  // namespace hybrid

namespace weft {
namespace {

using namespace harness;

class DdpInContexts : public testing::TestWithParam<Setting> {};

// Returns the averages of DDP without a context for each rank's input.
std::vector<at::Tensor> averages(ProcessGroup& group, const at::Tensor& input) {
  hybrid::Net net;
  DistributedDataParallel ddp(net, group);
  ddp(input).sum().backward();
  std::vector<at::Tensor> all;
  for (const auto& parameter : net->parameters()) all.push_back(parameter.grad().clone());
  return all;
}

at::Tensor input_of(int rank) { return at::linspace(0, 1, 6).view({2, 3}) + rank; }

TEST_P(DdpInContexts, AveragesInContextEqualLocalOnes) {
  hybrid::train(GetParam(), 4, 4, [](rpc::Agent& agent, ProcessGroup& group) {
    for (const bool views : {true, false}) {
      hybrid::Net net;
      DistributedDataParallel ddp(net, group, DdpOptions{.gradient_as_bucket_view = views});
      for (int round = 0; round < 3; ++round) {
        const auto expected = averages(group, input_of(agent.self().rank + round));
        AutogradContext context(agent);
        context.backward({ddp(input_of(agent.self().rank + round)).sum()});
        const auto parameters = net->parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          EXPECT_TRUE(at::allclose(context.gradient(parameters[i]), expected[i]))
              << i << ", views " << views << ", round " << round << ": "
              << context.gradient(parameters[i]) << " and not " << expected[i];
          EXPECT_FALSE(parameters[i].grad().defined());
        }
        EXPECT_EQ(context.gradients().size(), parameters.size());
      }
    }
  });
}

TEST_P(DdpInContexts, NoSyncGradientsAreAveragedLater) {
  hybrid::train(GetParam(), 2, 2, [](rpc::Agent& agent, ProcessGroup& group) {
    const int rank = agent.self().rank;
    const auto local_ones = [&](hybrid::Net& net, const at::Tensor& input) {
      return torch::autograd::grad({net(input).sum()}, net->parameters());
    };
    for (const bool views : {true, false}) {
      hybrid::Net net, plain;
      DistributedDataParallel ddp(net, group, DdpOptions{.gradient_as_bucket_view = views});
      DistributedDataParallel outside(plain, group, DdpOptions{.gradient_as_bucket_view = views});
      for (int round = 0; round < 2; ++round) {
        plain->zero_grad();
        AutogradContext context(agent);
        const auto parameters = net->parameters();
        {
          const auto quiet = ddp.no_sync();
          const auto quiet_outside = outside.no_sync();
          const auto local = local_ones(net, input_of(rank));
          for (int pass = 1; pass <= 2; ++pass) {
            context.backward({ddp(input_of(rank)).sum()});
            outside(input_of(rank)).sum().backward();
            for (std::size_t i = 0; i < parameters.size(); ++i) {
              EXPECT_TRUE(at::allclose(context.gradient(parameters[i]), local[i] * pass)) << i;
              EXPECT_FALSE(parameters[i].grad().defined());
            }
          }
        }
        for (int pass = 1; pass <= 2; ++pass) {
          context.backward({ddp(input_of(rank + 5)).sum()});
          outside(input_of(rank + 5)).sum().backward();
          for (std::size_t i = 0; i < parameters.size(); ++i) {
            EXPECT_TRUE(
                at::allclose(context.gradient(parameters[i]), plain->parameters()[i].grad()))
                << i;
          }
        }
        EXPECT_EQ(context.gradients().size(), parameters.size());
      }
    }
  });
}

TEST_P(DdpInContexts, EarlyFailedPassMayRunAgain) {
  hybrid::train(GetParam(), 2, 2, [](rpc::Agent& agent, ProcessGroup& group) {
    hybrid::Net net;
    DistributedDataParallel ddp(net, group);
    bool fails = true;
    net->first->weight.register_hook(
        [&](const at::Tensor&) {  // the last parameter; the other gradients have arrived
          if (fails) throw std::runtime_error("not yet");
        });
    AutogradContext context(agent);
    const auto loss = ddp(input_of(group.rank())).sum();
    const auto error = error_of([&] { context.backward({loss}, {.retain_graph = true}); });
    EXPECT_NE(error.text().find("not yet"), std::string::npos) << error.text();
    fails = false;
    context.backward({loss});
    const auto expected = averages(group, input_of(group.rank()));
    const auto parameters = net->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(at::allclose(context.gradient(parameters[i]), expected[i])) << i;
    }
  });
}

TEST_P(DdpInContexts, FailureBetweenBucketsIsReported) {
  hybrid::train(GetParam(), 2, 2, [](rpc::Agent& agent, ProcessGroup& group) {
    hybrid::Net net;
    DistributedDataParallel ddp(
        net, group, {.bucket_bytes = 1, .first_bucket_bytes = 1});  // a bucket for each parameter
    bool fails = true;
    net->first->weight.register_hook([&](const at::Tensor&) {
      if (fails) throw std::runtime_error("on purpose");
    });
    {
      AutogradContext context(agent);
      const auto error = error_of([&] { context.backward({ddp(input_of(group.rank())).sum()}); });
      EXPECT_NE(error.text().find("on purpose"), std::string::npos) << error.text();
    }
    fails = false;
    const auto error = error_of([&] { ddp(input_of(group.rank())); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("not in step"), std::string::npos) << error.text();
  });
}

TEST_P(DdpInContexts, OneForwardTakesOneBackward) {
  hybrid::train(GetParam(), 2, 2, [](rpc::Agent& agent, ProcessGroup& group) {
    // Each parameter has its own bucket, b's first: a backward over `a` sends none, one over `b`
    // sends b's.
    const DdpOptions options{.bucket_bytes = 1, .first_bucket_bytes = 1};
    const double x = 1 + group.rank();
    for (const std::size_t first : {std::size_t{0}, std::size_t{1}}) {
      hybrid::Heads net;
      const at::Tensor parameters[] = {net->a, net->b};
      std::optional<DistributedDataParallel<hybrid::HeadsImpl>> ddp;
      ddp.emplace(net, group, options);
      {
        AutogradContext context(agent);
        const auto outputs = (*ddp)(x);
        context.backward({outputs[first].sum()});
        const auto error = error_of([&] { context.backward({outputs[1 - first].sum()}); });
        EXPECT_EQ(error.blame(), Blame::Caller);
        EXPECT_NE(error.text().find("to one context.backward({a, b})"), std::string::npos)
            << error.text();
        const double local = first == 0 ? x : 2 * x;
        EXPECT_TRUE(at::allclose(context.gradient(parameters[first]), at::full({3}, local)))
            << "the gradient must be the local one";
        EXPECT_FALSE(context.gradient(parameters[1 - first]).defined());
        const auto missing = error_of([&] { (*ddp)(x); });
        EXPECT_EQ(missing.blame(), Blame::Caller);
        EXPECT_NE(missing.text().find("did not reduce all gradients"), std::string::npos)
            << missing.text();
      }
      ddp.emplace(net, group, options);
      AutogradContext context(agent);
      const auto outputs = (*ddp)(x);
      context.backward({outputs[0].sum(), outputs[1].sum()});
      EXPECT_TRUE(at::allclose(context.gradient(net->a), at::full({3}, 1.5)));
      EXPECT_TRUE(at::allclose(context.gradient(net->b), at::full({3}, 3.0)));
    }
  });
}

TEST_P(DdpInContexts, EachFullPassIsAveraged) {
  hybrid::train(GetParam(), 2, 2, [](rpc::Agent& agent, ProcessGroup& group) {
    hybrid::Heads net;
    DistributedDataParallel<hybrid::HeadsImpl> ddp(net, group);
    const double x = 1 + group.rank();
    for (const bool in_order : {true, false}) {
      AutogradContext context(agent);
      const auto one = ddp(x);
      const auto two = ddp(10 * x);
      const auto loss_of = [](const auto& outputs) { return outputs[0].sum() + outputs[1].sum(); };
      context.backward({loss_of(in_order ? one : two)});
      context.backward({loss_of(in_order ? two : one)}, {.retain_graph = true});
      EXPECT_TRUE(at::allclose(context.gradient(net->a), at::full({3}, 16.5)));
      EXPECT_TRUE(at::allclose(context.gradient(net->b), at::full({3}, 33.0)));
      context.backward({loss_of(in_order ? two : one)});
      EXPECT_TRUE(at::allclose(context.gradient(net->a), at::full({3}, in_order ? 31.5 : 18.0)));
    }
  });
}

TEST_P(DdpInContexts, UnevenInputsEqualPlainJoin) {
  hybrid::train(GetParam(), 4, 4, [](rpc::Agent& agent, ProcessGroup& group) {
    const int rank = agent.self().rank;
    std::vector<at::Tensor> expected;
    {
      hybrid::Net net;
      DistributedDataParallel ddp(net, group);
      join(ddp, [&] {
        for (int i = 0; i < (rank % 2 == 0 ? 3 : 1); ++i) {
          net->zero_grad();
          ddp(input_of(rank + i)).sum().backward();
        }
        // Copies them now: a rank that has run out of inputs receives the others' gradients
        // afterwards.
        for (const auto& parameter : net->parameters())
          expected.push_back(parameter.grad().clone());
      });
    }
    hybrid::Net net;
    DistributedDataParallel ddp(net, group);
    join(ddp, [&] {
      for (int i = 0; i < (rank % 2 == 0 ? 3 : 1); ++i) {
        AutogradContext context(agent);
        context.backward({ddp(input_of(rank + i)).sum()});
        const auto parameters = net->parameters();
        for (std::size_t k = 0; k < parameters.size() && i == (rank % 2 == 0 ? 2 : 0); ++k) {
          EXPECT_TRUE(at::allclose(context.gradient(parameters[k]), expected[k])) << k;
        }
      }
    });
  });
}

TEST_P(DdpInContexts, SparseGradientsAreAveraged) {
  hybrid::train(GetParam(), 4, 4, [](rpc::Agent& agent, ProcessGroup& group) {
    const int rank = agent.self().rank;
    const auto indices = at::tensor({rank, 3, 3}, at::kLong);
    hybrid::Words local;
    DistributedDataParallel plain(local, group);
    plain(indices).sum().backward();
    hybrid::Words words;
    DistributedDataParallel ddp(words, group);
    AutogradContext context(agent);
    context.backward({ddp(indices).sum()});
    EXPECT_EQ(context.gradients().size(), 1u);
    const auto gradient = context.gradient(words->words->weight);
    EXPECT_TRUE(gradient.is_sparse());
    EXPECT_TRUE(at::allclose(gradient.to_dense(), local->words->weight.grad().to_dense()));
  });
}

TEST_P(DdpInContexts, RemoteLayerMayPrecedeADdpLayer) {
  hybrid::train(GetParam(), 5, 4, [](rpc::Agent& agent, ProcessGroup& group) {
    const auto weight = at::linspace(-1, 1, 9).view({3, 3});
    const auto x = input_of(agent.self().rank);
    // The same in one process, except for DDP.
    hybrid::Layer local(weight);
    hybrid::Net local_net;
    DistributedDataParallel plain(local_net, group);
    plain(local.forward(x)).sum().backward();

    for (const bool names_device : {false, true}) {
      const auto layer = names_device
                             ? agent.remote<hybrid::Layer>(4, weight, c10::Device(at::kCPU))
                             : agent.remote<hybrid::Layer>(4, weight);
      hybrid::Net net;
      DistributedDataParallel ddp(net, group);
      for (int round = 0; round < 2; ++round) {
        AutogradContext context(agent);
        context.backward({ddp(layer.sync<&hybrid::Layer::forward>(x)).sum()});
        const auto parameters = net->parameters(), expected = local_net->parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          EXPECT_TRUE(at::allclose(context.gradient(parameters[i]), expected[i].grad())) << i;
        }
        // The remote layer is not averaged: each context has its own gradient.
        EXPECT_TRUE(at::allclose(layer.sync<&hybrid::Layer::gradient>(), local.weight.grad()));
      }
    }
  });
}

// DDP wraps a whole model with a remote layer in the middle.
TEST_P(DdpInContexts, DdpMayWrapAModelWithARemoteLayer) {
  hybrid::train(GetParam(), 4, 3, [](rpc::Agent& agent, ProcessGroup& group) {
    const auto weight = at::linspace(-1, 1, 9).view({3, 3});
    const auto layer = agent.remote<hybrid::Layer>(3, weight);
    for (const bool uses_spare : {true, false}) {
      const auto x = input_of(agent.self().rank);
      const DdpOptions options{.find_unused_parameters = !uses_spare};
      // The same in one process, except for DDP.
      hybrid::Layer local(weight);
      hybrid::Sandwich local_net([&](const at::Tensor& y) { return local.forward(y); });
      DistributedDataParallel plain(local_net, group, options);
      hybrid::Sandwich net(
          [&](const at::Tensor& y) { return layer.sync<&hybrid::Layer::forward>(y); });
      DistributedDataParallel ddp(net, group, options);
      for (int round = 0; round < 3; ++round) {
        local_net->zero_grad();
        plain(x, uses_spare).sum().backward();
        AutogradContext context(agent);
        context.backward({ddp(x, uses_spare).sum()});
        const auto parameters = net->parameters(), expected = local_net->parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          const at::Tensor found = context.gradient(parameters[i]);
          ASSERT_EQ(found.defined(), expected[i].grad().defined()) << i;
          if (found.defined()) {
            EXPECT_TRUE(at::allclose(found, expected[i].grad())) << i;
          }
        }
        EXPECT_TRUE(at::count_nonzero(context.gradient(net->before->weight)).item<int>() > 0);
      }
    }
  });
}

TEST_P(DdpInContexts, NestedBackwardIsRefused) {
  hybrid::train(GetParam(), 2, 2, [](rpc::Agent& agent, ProcessGroup& group) {
    hybrid::Recomputed net;
    DistributedDataParallel ddp(net, group);
    AutogradContext context(agent);
    const auto x = at::ones({3}).requires_grad_();
    const auto error = error_of([&] { context.backward({ddp(x).sum()}); });
    EXPECT_NE(error.text().find("calls backward() inside of a distributed backward"),
              std::string::npos)
        << error.text();
  });
}

TEST_P(DdpInContexts, OverlappedOptimizerIsRefused) {
  hybrid::train(GetParam(), 2, 2, [](rpc::Agent& agent, ProcessGroup& group) {
    hybrid::Net net;
    DistributedDataParallel ddp(net, group);
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(net->parameters(), group,
                                                    torch::optim::SGDOptions(0.1));
    zero.overlap_with(ddp);
    {
      AutogradContext context(agent);
      const auto error = error_of([&] { context.backward({ddp(input_of(0)).sum()}); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_NE(error.text().find("leave out overlap_with"), std::string::npos) << error.text();
    }
    ddp(input_of(0)).sum().backward();  // works, because nothing had been sent
    zero.step();
  });
}

// The average gradient is zero, because one trainer's words are the other's, negated.
TEST_P(DdpInContexts, MasterDrivesHybridTrainers) {
  constexpr int kTrainers = 4, kRemote = 4, kMaster = 5;
  hybrid::train(GetParam(), 6, 6, [&](rpc::Agent& agent, ProcessGroup& all) {
    const int rank = agent.self().rank;
    ProcessGroup trainers = all.new_group({0, 1, 2, 3});
    if (rank < kTrainers) {
      std::lock_guard lock(hybrid::groups_mutex);
      hybrid::groups[rank] = &trainers;
    }
    all.barrier().wait();
    if (rank != kMaster) {
      all.barrier().wait();
      return;
    }
    const auto words = agent.remote<&hybrid::negated_words>(kRemote);
    const auto layer = agent.remote<hybrid::Layer>(kRemote, at::eye(3));
    for (const auto averaged :
         {hybrid::Averaged::Nothing, hybrid::Averaged::Inner, hybrid::Averaged::All}) {
      std::vector<Future<std::vector<std::vector<std::int64_t>>>> asked;
      for (int trainer = 0; trainer < kTrainers; ++trainer) {
        asked.push_back(agent.async<&hybrid::train_as_told>(trainer, words, layer,
                                                            static_cast<int>(averaged), 3));
      }
      const std::int64_t inner = averaged == hybrid::Averaged::Nothing ? 9 : 0;
      const std::int64_t outer = averaged == hybrid::Averaged::All ? 0 : 3;
      for (auto& trainer : asked) {
        const std::vector<std::int64_t> expected = {inner, outer, 9, 3};
        EXPECT_EQ(trainer.get(), std::vector(3, expected)) << static_cast<int>(averaged);
      }
    }
    all.barrier().wait();
  });
}

TEST_P(DdpInContexts, RemoteLayersAlternateWithDdp) {
  hybrid::train(GetParam(), 3, 2, [](rpc::Agent& agent, ProcessGroup& group) {
    hybrid::alternate_layers(agent, group, /*remote=*/2, c10::Device(at::kCPU));
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, DdpInContexts, testing::ValuesIn(hybrid::places()),
                         hybrid::place_name);

}  // namespace
}  // namespace weft
