// SPDX-License-Identifier: Apache-2.0
// Code that must not compile. compile_test.py compiles this file and expects, for each line that
// ends with "refused: …", an error at that line with that text. Each line has types of its own,
// because the compiler reports an error once for each type.
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <torch/nn/modules/container/any.h>
#include <torch/optim/lbfgs.h>

#include <weft/checkpoint.h>
#include <weft/fully_shard.h>
#include <weft/optim.h>
#include <weft/parallel.h>
#include <weft/rpc.h>

namespace refused {

using namespace weft;

int plus(int a, int b);
void nothing();
void changes(std::string& text);
int views(std::string_view text);
int spans(std::span<float> floats);
int refers(at::IntArrayRef numbers);
int points(const double* number);
using Texts = std::map<int, std::vector<std::string_view>>;
int views_in_a_container(Texts texts);
int awaits(Future<std::int8_t> value);
int awaits_too(Future<std::int16_t> value);
int awaits_as_well(Future<std::int64_t> value);
std::string_view gives_a_view();
const char* gives_a_pointer();
std::vector<std::span<int>> gives_spans();
std::array<std::string_view, 2> stays();
struct Fixed {
  Fixed() = default;
  Fixed(Fixed&&) = delete;
};
struct FixedToo : Fixed {};
Fixed gives_fixed();
FixedToo gives_fixed_too();
struct Single {
  Single(Single&&) = default;
};
Future<Single> gives_single_later();
int overloaded(int);
int overloaded(double);
constexpr auto lambda = [](int a) { return a; };

struct Counter {
  explicit Counter(int start);
  int add(int change);
  void changes(std::vector<int>& numbers);
  std::span<double> name() const;
};
struct Elsewhere {
  int get();
};
struct Viewing {
  std::u8string_view text;
  int number = 0;
  WEFT_FIELDS(text, number)  // refused: a value that is sent cannot hold a view or a pointer
};
struct WithoutFields {
  int number = 0;
};
struct WithoutDefault {
  explicit WithoutDefault(int start) : number(start) {}
  int number;
  WEFT_FIELDS(number)
};
int takes_without_fields(WithoutFields value);
int takes_without_default(WithoutDefault value);
Future<Future<int>> gives_twice_later();
struct Pointing {
  std::vector<int*> numbers;
  WEFT_FIELDS(numbers)  // refused: a value that is sent cannot hold a view or a pointer
};

// They could be made of these arguments, but only explicitly.
struct Aggregate {
  double rate = 0;
  int steps = 0;
  WEFT_FIELDS(rate, steps)
};
struct Configured {
  Configured() = default;
  explicit Configured(int size) : size(size) {}
  int size = 0;
  WEFT_FIELDS(size)
};
long sum(std::vector<long> numbers);
double rate_of(Aggregate settings);
int size_of(Configured settings);
int value_of(RRef<int> reference);

// All of these are refused before anything is sent; rpc/errors_test.cc covers foreign programs.
void calls(rpc::Agent& agent, const Future<int>& later) {
  agent.sync<&plus>(1, 1, 2, 3);    // refused: the function takes another number of arguments
  agent.async<&plus>(1, 1);         // refused: the function takes another number of arguments
  agent.remote<&plus>(1);           // refused: the function takes another number of arguments
  agent.sync<&plus>(1, 1, "two");   // refused: an argument cannot be converted to the type
  agent.sync<&sum>(1, 5);           // refused: an argument cannot be converted to the type
  agent.async<&rate_of>(1, 0.1);    // refused: an argument cannot be converted to the type
  agent.remote<&size_of>(1, 5);     // refused: an argument cannot be converted to the type
  agent.sync<&value_of>(1, 5);      // refused: an argument cannot be converted to the type
  agent.async<&plus>(1, later, 2);  // refused: an argument cannot be converted to the type
  agent.sync<&plus>(1.0, 1, 2);     // refused: deleted function
  agent.sync<lambda>(1, 2);         // refused: a lambda or function object has no name
  agent.sync<&overloaded>(1, 2);    // refused: no matching function
  agent.sync<&Counter::add>(1, 2);  // refused: this is a member function: call it through an RRef
  agent.sync_op("aten::add", 1, std::map<int, int>());  // refused: an operator called by name takes
}

void scripts(rpc::Agent& agent) {
  agent.sync_script("math.f", 1, Counter(1));  // refused: a script takes tensors, numbers, strings
  agent.sync_script<std::map<int, Counter>>("math.f",
                                            1);  // refused: a script's result is a tensor, a number
}

void parameters(rpc::Agent& agent) {
  agent.async<&changes>(1, "text");  // refused: cannot take a non-const lvalue reference
  agent.async<&views>(1,
                      "text");  // refused: cannot take a view or a pointer, nor a container of them
  agent.async<&spans>(
      1, std::span<float>());  // refused: cannot take a view or a pointer, nor a container of them
  agent.async<&refers>(
      1, at::IntArrayRef());  // refused: cannot take a view or a pointer, nor a container of them
  agent.async<&points>(
      1, nullptr);  // refused: cannot take a view or a pointer, nor a container of them
  agent.async<&views_in_a_container>(1, Texts());  // refused: nor a container of them
  // In all modes. Only a result may be a Future: then the function answers later.
  agent.async<&awaits>(1, Future<std::int8_t>());            // refused: a Future cannot be sent
  agent.sync<&awaits_too>(1, Future<std::int16_t>());        // refused: a Future cannot be sent
  agent.remote<&awaits_as_well>(1, Future<std::int64_t>());  // refused: a Future cannot be sent
}

void results(rpc::Agent& agent) {
  agent.async<&gives_a_view>(
      1);  // refused: cannot return a view or a pointer, nor a container of them
  agent.async<&gives_a_pointer>(
      1);  // refused: cannot return a view or a pointer, nor a container of them
  agent.async<&gives_spans>(
      1);  // refused: cannot return a view or a pointer, nor a container of them
  agent.remote<&stays>(1)
      .to_here();  // refused: cannot return a view or a pointer, nor a container of them
  agent.async<&gives_fixed>(1);             // refused: cannot return a value that cannot be moved
  agent.remote<&gives_fixed_too>(1);        // refused: cannot return a value that cannot be moved
  agent.remote<&gives_single_later>(1);     // refused: a Future of a value that cannot be copied
  agent.async<&gives_twice_later>(1);       // refused: cannot return a Future of a Future
  RRef<Counter>().async<&Counter::name>();  // refused: cannot return a view or a pointer
}

void values(rpc::Agent& agent, std::span<const std::byte> bytes) {
  agent.sync<&takes_without_fields>(
      1, WithoutFields());  // refused: cannot travel: write WEFT_FIELDS(a, b)
  agent.sync<&takes_without_default>(
      1, WithoutDefault(1));       // refused: give this struct a default constructor
  encode(torch::nn::AnyModule());  // refused: cannot travel: write WEFT_FIELDS(a, b)
  decode<std::pair<int, std::string_view>>(
      bytes);  // refused: a value that is sent cannot hold a view or a pointer
}

// Calls of methods, in all modes.
void references(rpc::Agent& agent, const RRef<Counter>& counter) {
  counter.sync<&Counter::add>();       // refused: the method takes another number of arguments
  counter.async<&Counter::add>(1, 2);  // refused: the method takes another number of arguments
  counter.remote<&Counter::add>(
      "text");  // refused: an argument cannot be converted to the type that the function
  counter.sync<&Counter::changes>(
      std::vector<int>());                 // refused: cannot take a non-const lvalue reference
  counter.sync<&Elsewhere::get>();         // refused: a member function of another class
  counter.sync<&Counter::none>();          // refused: is not a member of
  counter.async<&Counter::none_later>();   // refused: is not a member of
  counter.remote<&Counter::none_there>();  // refused: is not a member of
  agent.remote<Counter>(
      1, std::vector<int>());  // refused: M has no constructor that takes these arguments
  remote_parameters(counter);  // refused: remote_parameters takes a reference to a module
}

void futures(const Future<int>& number, const Future<void>& done) {
  const auto takes_text = [](std::string text) { return text; };
  const auto takes_number = [](int value) { return value; };
  number.then(takes_text);  // refused: a continuation takes the Future, or its value
  done.then(
      takes_number);  // refused: a continuation of a Future<void> takes the Future, or nothing
}

void optimizers() {
  static_cast<void>(
      sizeof(DistributedOptimizer<torch::optim::LBFGS>));  // refused: LBFGS computes the loss again
  static_cast<void>(sizeof(
      ZeroRedundancyOptimizer<torch::optim::LBFGS>));  // refused: LBFGS looks at all parameters
}

void options() {
  rpc::init("worker0", {.worker_threads = "many"});  // refused: could not convert
  rpc::init("worker0", {.timeout = 5});              // refused: could not convert
}

void parts(DistributedDataParallel<torch::nn::Module>& ddp, torch::optim::LBFGS optimizer) {
  checkpoint::Part("model", ddp);  // refused: (of a DistributedDataParallel: its module())
  checkpoint::Part("number",
                   1.0L);  // refused: a bool, an integer, a float, a double, a std::string
  checkpoint::Part("module",
                   torch::nn::Module());  // refused: this module would be gone before it is saved
  checkpoint::Part(
      "optimizer",
      std::move(optimizer));  // refused: this optimizer would be gone before it is saved
}

struct TakesAll : torch::nn::Module {
  template <class... Given>
  at::Tensor forward(const Given&...) {
    return {};
  }
};
struct Naming {
  std::string_view name;
  auto weft_fields() const { return std::tie(name); }
};

// Arguments that may be gone in backward, also inside of others.
void checkpoints(const std::shared_ptr<TakesAll>& module, at::Tensor tensor,
                 const std::string& text, std::vector<float> numbers, char letters[4]) {
  const char* pointer = text.c_str();
  checkpointed(module, at::TensorList(tensor));                      // refused: until backward
  checkpointed(module, tensor, at::IntArrayRef({1, 2}));             // refused: until backward
  checkpointed(module, at::ITensorListRef(at::TensorList(tensor)));  // refused: until backward
  checkpointed(module, std::span(numbers));                          // refused: until backward
  checkpointed(module, std::string_view(text));                      // refused: until backward
  checkpointed(module, pointer);                                     // refused: until backward
  checkpointed(module, letters);                                     // refused: until backward
  checkpointed(module, &tensor);                                     // refused: until backward
  checkpointed(module, std::as_const(numbers).data());               // refused: until backward
  checkpointed(module, std::ref(tensor));                            // refused: until backward
  checkpointed(module, std::tie(tensor, text));                      // refused: until backward
  checkpointed(module, std::optional<at::IntArrayRef>());            // refused: until backward
  checkpointed(module, at::OptionalIntArrayRef());                   // refused: until backward
  checkpointed(module, std::vector<std::string_view>());             // refused: until backward
  checkpointed(module, std::make_pair(1, pointer));                  // refused: until backward
  checkpointed(module, std::variant<int, at::TensorList>());         // refused: until backward
  checkpointed(module, std::map<std::string, std::array<std::span<int>, 2>>());  // refused: until
  checkpointed(module, Naming());  // refused: until backward
}

}  // namespace refused
