// SPDX-License-Identifier: Apache-2.0
// Mistakes of everyday use. compile_test.py compiles each "#ifdef NAME  // says: SENTENCE" in a
// namespace of its own, after a copy of the declarations that all of them share. It expects the
// sentence in at most 15 lines of output, which name a line of the mistake. "FIRST | SECOND"
// accepts either, where compilers word an error differently. "in 20 lines" sets another limit,
// where compilers show both overloads of remote(), or where a macro makes them say a thing twice.
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <weft/checkpoint.h>
#include <weft/codec.h>
#include <weft/fully_shard.h>
#include <weft/functional.h>
#include <weft/future.h>
#include <weft/group.h>
#include <weft/objects.h>
#include <weft/optim.h>
#include <weft/parallel.h>
#include <weft/rpc.h>

namespace mistakes {

using weft::DistributedDataParallel;
using weft::FullyShardedDataParallel;
using weft::Future;
using weft::ProcessGroup;
using weft::RRef;
using weft::rpc::Agent;

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
int plus(int a, int b) { return a + b; }
std::string text_of(int number) { return std::to_string(number); }

struct Counter {
  Counter() = default;
  explicit Counter(int first) : count(first) {}
  int add(int change) { return count += change; }
  void fill(std::vector<int>& numbers) { numbers.push_back(count); }
  const int* place() const { return &count; }
  int get() const { return count; }
  int get(int more) const { return count + more; }
  int count = 0;
};
struct Timer {
  double seconds() const { return 1; }
};
struct NetImpl : torch::nn::Module {
  NetImpl() : linear(register_module("linear", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& input) { return linear(input); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Net);

// A struct without WEFT_FIELDS.
struct Settings {
  double rate = 0.1;
};

// ---- Calls of functions: arguments.

#ifdef TOO_FEW_ARGUMENTS  // says: the function takes another number of arguments
at::Tensor sum(const Agent& agent, const at::Tensor& x) { return agent.sync<&add>("worker1", x); }
#endif
#ifdef TOO_MANY_ARGUMENTS  // says: the function takes another number of arguments
int sum(const Agent& agent) { return agent.async<&plus>("worker1", 1, 2, 3).get(); }
#endif
#ifdef TOO_FEW_ARGUMENTS_OF_REMOTE  // says: the function takes another number of arguments
at::Tensor sum(const Agent& agent, const at::Tensor& x) {
  return agent.remote<&add>("worker1", x).to_here();
}
#endif
#ifdef NO_DESTINATION_BUT_A_NUMBER  // says: the function takes another number of arguments
int sum(const Agent& agent) { return agent.sync<&plus>(1, 2); }
#endif
#ifdef NO_DESTINATION_BUT_A_TENSOR  // says: Destination
at::Tensor sum(const Agent& agent, const at::Tensor& x) { return agent.sync<&add>(x, x); }
#endif
#ifdef DESTINATION_OF_DOUBLE  // says: a rank is a whole number
int sum(const Agent& agent) { return agent.async<&plus>(1.0, 1, 2).get(); }
#endif
#ifdef WRONG_TYPE  // says: an argument cannot be converted to the type that the function takes
int sum(const Agent& agent) { return agent.sync<&plus>("worker1", 1, "two"); }
#endif
#ifdef WRONG_TYPE_OF_ASYNC  // says: an argument cannot be converted to the type that the function
                            // takes
at::Tensor sum(const Agent& agent, const at::Tensor& x) {
  Future<at::Tensor> result = agent.async<&add>("worker1", x, std::string("two"));
  return result.then([](const at::Tensor& value) { return value * 2; }).get();
}
#endif
#ifdef FUTURE_AS_ARGUMENT  // says: give future.get()
int sum(const Agent& agent) {
  const auto first = agent.async<&plus>("worker1", 1, 2);
  return agent.sync<&plus>("worker1", first, 3);
}
#endif
#ifdef REFERENCE_AS_ARGUMENT  // says: rref.to_here()
int sum(const Agent& agent) {
  const auto first = agent.remote<&plus>("worker1", 1, 2);
  return agent.remote<&plus>("worker1", first, 3).to_here();
}
#endif
#ifdef UNIQUE_POINTER_NOT_MOVED  // says: std::move
int value_of(std::unique_ptr<int> pointer) { return *pointer; }
int value(const Agent& agent) {
  auto pointer = std::make_unique<int>(1);
  return agent.sync<&value_of>("worker1", pointer);
}
#endif

// ---- Calls of functions: parameters and results.

#ifdef POINTER_PARAMETER  // says: cannot take a view or a pointer
double total(const double* numbers, int) { return *numbers; }
double sum(const Agent& agent, const std::vector<double>& numbers) {
  return agent.sync<&total>("worker1", numbers.data(), 2);
}
#endif
#ifdef C_STRING_PARAMETER  // says: cannot take a view or a pointer
int length(const char* text) { return text[0]; }
int call(const Agent& agent) { return agent.async<&length>("worker1", "text").get(); }
#endif
#ifdef NON_CONST_REFERENCE  // says: cannot take a non-const lvalue reference
void append(std::vector<int>& numbers) { numbers.push_back(1); }
void call(const Agent& agent) {
  std::vector<int> numbers;
  agent.sync<&append>("worker1", numbers);
}
#endif
#ifdef VIEW_PARAMETER  // says: cannot take a view or a pointer
std::size_t length(std::string_view text) { return text.size(); }
std::size_t call(const Agent& agent) { return agent.sync<&length>("worker1", "text"); }
#endif
#ifdef FUTURE_PARAMETER  // says: a Future cannot be sent
int value_of(Future<int> future) { return future.get(); }
int call(const Agent& agent, const Future<int>& later) {
  return agent.remote<&value_of>("worker1", later).to_here();
}
#endif
#ifdef FUNCTION_PARAMETER  // says: a std::function cannot be sent
int apply(std::function<int(int)> function) { return function(1); }
int call(const Agent& agent) {
  return agent.sync<&apply>("worker1", [](int number) { return number; });
}
#endif
#ifdef RETURNS_POINTER  // says: cannot return a view or a pointer
const char* name() { return "name"; }
std::string call(const Agent& agent) { return agent.sync<&name>("worker1"); }
#endif
#ifdef RETURNS_POINTER_TO_OBJECT  // says: cannot return a view or a pointer
Counter* make() { return new Counter(1); }
int call(const Agent& agent) { return agent.async<&make>("worker1").get()->count; }
#endif
#ifdef RETURNS_VIEW  // says: cannot return a view or a pointer
std::string_view name() { return "name"; }
std::string call(const Agent& agent) { return std::string(agent.sync<&name>("worker1")); }
#endif
#ifdef RETURNS_FUTURE_OF_FUTURE  // says: cannot return a Future of a Future
Future<Future<int>> later();
void call(const Agent& agent) { agent.async<&later>("worker1"); }
#endif
#ifdef RETURNS_WHAT_CANNOT_BE_MOVED  // says: cannot return a value that cannot be moved
struct Fixed {
  Fixed() = default;
  Fixed(const Fixed&) = delete;
};
Fixed make() { return {}; }
void call(const Agent& agent) { agent.remote<&make>("worker1"); }
#endif

// ---- The function that is called.

#ifdef LAMBDA  // says: a lambda or function object has no name
int call(const Agent& agent) {
  return agent.sync<[](int a) { return a; }>("worker1", 1);
}
#endif
#ifdef LAMBDA_OF_ASYNC  // says: a lambda or function object has no name
constexpr auto twice = [](int a) { return 2 * a; };
int call(const Agent& agent) { return agent.async<twice>("worker1", 1).get(); }
#endif
#ifdef LAMBDA_AS_ARGUMENT  // says: static_cast<R (*)(P...)>(&f)
int call(const Agent& agent) {
  return agent.sync(
      "worker1", [](int a) { return a; }, 1);
}
#endif
#ifdef FUNCTION_AS_ARGUMENT  // says: static_cast<R (*)(P...)>(&f)
int call(const Agent& agent) { return agent.async(&plus, "worker1", 1, 2).get(); }
#endif
#ifdef OVERLOADED  // says: static_cast<R (*)(P...)>(&f)
int twice(int a) { return 2 * a; }
double twice(double a) { return 2 * a; }
int call(const Agent& agent) { return agent.sync<&twice>("worker1", 1); }
#endif
#ifdef OVERLOADED_OF_REMOTE  // in 20 lines, says: static_cast<R (*)(P...)>(&f)
int call(const Agent& agent, const at::Tensor& x) {
  return agent.remote<&at::sum>("worker1", x).to_here();
}
#endif
#ifdef TEMPLATE_WITHOUT_ARGUMENTS  // says: static_cast<R (*)(P...)>(&f)
template <class T>
T twice(T a) {
  return 2 * a;
}
int call(const Agent& agent) { return agent.sync<&twice>("worker1", 1); }
#endif
#ifdef VARIABLE_OF_FUNCTION  // says: static_cast<R (*)(P...)>(&f)
int call(const Agent& agent) {
  auto function = &plus;
  return agent.sync<function>("worker1", 1, 2);
}
#endif
#ifdef MEMBER_FUNCTION_OF_AGENT  // says: this is a member function: call it through an RRef
int call(const Agent& agent) { return agent.sync<&Counter::add>("worker1", 1); }
#endif
#ifdef NUMBER_AS_FUNCTION  // says: a lambda or function object has no name
int call(const Agent& agent) { return agent.sync<7>("worker1", 1); }
#endif

// ---- Values without a codec.

#ifdef STRUCT_AS_ARGUMENT  // says: WEFT_FIELDS
double rate(Settings settings) { return settings.rate; }
double call(const Agent& agent) { return agent.sync<&rate>("worker1", Settings()); }
#endif
#ifdef STRUCT_IN_A_VECTOR  // says: WEFT_FIELDS
std::size_t count(std::vector<Settings> settings) { return settings.size(); }
std::size_t call(const Agent& agent) {
  return agent.async<&count>("worker1", std::vector<Settings>(2)).get();
}
#endif
#ifdef STRUCT_IN_A_MAP  // says: WEFT_FIELDS
std::size_t count(const std::map<std::string, Settings>& settings) { return settings.size(); }
std::size_t call(const Agent& agent) {
  return agent.sync<&count>("worker1", std::map<std::string, Settings>());
}
#endif
#ifdef STRUCT_AS_RESULT  // says: WEFT_FIELDS
Settings settings() { return {}; }
double call(const Agent& agent) { return agent.sync<&settings>("worker1").rate; }
#endif
#ifdef STRUCT_AS_VALUE_FETCHED  // says: WEFT_FIELDS
int call(const Agent& agent) { return agent.remote<Counter>("worker1", 1).to_here().count; }
#endif
#ifdef STRUCT_IN_A_STRUCT  // says: WEFT_FIELDS
struct Outer {
  Settings settings;
  int number = 0;
  WEFT_FIELDS(settings, number)
};
int number(Outer outer) { return outer.number; }
int call(const Agent& agent) { return agent.sync<&number>("worker1", Outer()); }
#endif
#ifdef POINTER_IN_A_STRUCT  // says: cannot hold a view or a pointer
struct Outer {
  int* place = nullptr;
  int number = 0;
  WEFT_FIELDS(place, number)
};
int number(Outer outer) { return outer.number; }
int call(const Agent& agent) { return agent.sync<&number>("worker1", Outer()); }
#endif
#ifdef NO_DEFAULT_CONSTRUCTOR  // says: give this struct a default constructor
struct Outer {
  explicit Outer(int first) : number(first) {}
  int number;
  WEFT_FIELDS(number)
};
int number(Outer outer) { return outer.number; }
int call(const Agent& agent) { return agent.sync<&number>("worker1", Outer(1)); }
#endif
#ifdef PRIVATE_FIELDS  // says: where it is public
class Closed {
  int number = 0;
  WEFT_FIELDS(number)
};
int number(Closed) { return 1; }
int call(const Agent& agent) { return agent.sync<&number>("worker1", Closed()); }
#endif
#ifdef FIELD_THAT_IS_NONE  // in 20 lines, says: 'numbre'
struct Outer {
  int number = 0;
  WEFT_FIELDS(numbre)
};
int number(Outer outer) { return outer.number; }
int call(const Agent& agent) { return agent.sync<&number>("worker1", Outer()); }
#endif
#ifdef FIELDS_OF_A_LOCAL_STRUCT  // in 20 lines, says: local class
auto bytes() {
  struct Local {
    int number = 0;
    WEFT_FIELDS(number)
  };
  return weft::encode(Local());
}
#endif
#ifdef LONG_DOUBLE  // says: a long double cannot be sent
long double half(long double number) { return number / 2; }
long double call(const Agent& agent) { return agent.sync<&half>("worker1", 1.0L); }
#endif
#ifdef MODULE_AS_ARGUMENT  // says: a torch::nn module
at::Tensor run(Net net, at::Tensor x) { return net(x); }
at::Tensor call(const Agent& agent, const Net& net, const at::Tensor& x) {
  return agent.sync<&run>("worker1", net, x);
}
#endif
#ifdef SHARED_MODULE_AS_ARGUMENT  // says: a torch::nn module
void train(std::shared_ptr<torch::nn::Module> net) { net->train(); }
void call(const Agent& agent, const Net& net) { agent.async<&train>("worker1", net.ptr()).get(); }
#endif
#ifdef MODULE_IMPL_AS_ARGUMENT  // says: a torch::nn module
at::Tensor run(NetImpl net, at::Tensor x) { return net.forward(x); }
at::Tensor call(const Agent& agent, const NetImpl& net, const at::Tensor& x) {
  return agent.sync<&run>("worker1", net, x);
}
#endif
#ifdef MODULES_AS_ARGUMENT  // says: a torch::nn module
std::size_t count(std::vector<torch::nn::Linear> layers) { return layers.size(); }
std::size_t call(const Agent& agent) {
  return agent.sync<&count>("worker1", std::vector<torch::nn::Linear>());
}
#endif
#ifdef MODULE_AS_RESULT  // says: a torch::nn module
Net make() { return {}; }
at::Tensor call(const Agent& agent, const at::Tensor& x) { return agent.sync<&make>("worker1")(x); }
#endif
#ifdef MODULE_FETCHED  // says: a torch::nn module
at::Tensor call(const Agent& agent, const at::Tensor& x) {
  return agent.remote<Net>("worker1").to_here()(x);
}
#endif
#ifdef OPTIMIZER_AS_ARGUMENT  // says: WEFT_FIELDS
void step(std::shared_ptr<torch::optim::SGD> optimizer) { optimizer->step(); }
void call(const Agent& agent, const std::shared_ptr<torch::optim::SGD>& sgd) {
  agent.sync<&step>("worker1", sgd);
}
#endif
#ifdef STRUCT_ENCODED  // says: WEFT_FIELDS
auto bytes() { return weft::encode(Settings()); }
#endif
#ifdef MODULE_ENCODED  // says: a torch::nn module
auto bytes(const Net& net) { return weft::encode(net); }
#endif
#ifdef VIEW_DECODED  // says: cannot hold a view or a pointer
auto text(const std::vector<std::byte>& bytes) { return weft::decode<std::string_view>(bytes); }
#endif
#ifdef POINTER_ENCODED  // says: cannot hold a view or a pointer
auto bytes(const Counter& counter) { return weft::encode(&counter); }
#endif
#ifdef STRUCT_OF_ALL_RANKS  // says: WEFT_FIELDS
double call(const ProcessGroup& group) {
  return weft::all_gather_object(Settings(), group)[0].rate;
}
#endif
#ifdef STRUCT_RECEIVED  // says: WEFT_FIELDS
double call(const ProcessGroup& group) { return weft::recv_object<Settings>(0, group).rate; }
#endif

// ---- References.

#ifdef TOO_FEW_ARGUMENTS_OF_A_METHOD  // says: the method takes another number of arguments
int call(const RRef<Counter>& counter) { return counter.sync<&Counter::add>(); }
#endif
#ifdef TOO_MANY_ARGUMENTS_OF_A_METHOD  // says: the method takes another number of arguments
int call(const RRef<Counter>& counter) { return counter.async<&Counter::add>(1, 2).get(); }
#endif
#ifdef WRONG_TYPE_OF_A_METHOD  // says: an argument cannot be converted to the type that the
                               // function takes
int call(const RRef<Counter>& counter) { return counter.remote<&Counter::add>("one").to_here(); }
#endif
#ifdef WRONG_TYPE_OF_A_METHOD_WITHIN_A_TIME  // says: an argument cannot be converted to the type
                                             // that the function takes
int call(const RRef<Counter>& counter) {
  return counter.timeout(std::chrono::seconds(1)).sync<&Counter::add>("one");
}
#endif
#ifdef DESTINATION_OF_A_METHOD  // says: the method takes another number of arguments
int call(const RRef<Counter>& counter) { return counter.sync<&Counter::add>("worker1", 1); }
#endif
#ifdef NON_CONST_REFERENCE_OF_A_METHOD  // says: cannot take a non-const lvalue reference
void call(const RRef<Counter>& counter, std::vector<int> numbers) {
  counter.sync<&Counter::fill>(numbers);
}
#endif
#ifdef METHOD_RETURNS_POINTER  // says: cannot return a view or a pointer
int call(const RRef<Counter>& counter) { return *counter.sync<&Counter::place>(); }
#endif
#ifdef METHOD_OF_ANOTHER_CLASS  // says: a member function of another class
double call(const RRef<Counter>& counter) { return counter.sync<&Timer::seconds>(); }
#endif
#ifdef METHOD_THAT_IS_NONE  // says: is not a member of | no member named 'none'
void call(const RRef<Counter>& counter) { counter.sync<&Counter::none>(); }
#endif
#ifdef MEMBER_VARIABLE  // says: a lambda or function object has no name
int call(const RRef<Counter>& counter) { return counter.sync<&Counter::count>(); }
#endif
#ifdef OVERLOADED_METHOD  // says: static_cast<R (M::*)(P...)>(&M::f)
int call(const RRef<Counter>& counter) { return counter.sync<&Counter::get>(1); }
#endif
#ifdef LAMBDA_ON_A_VALUE  // says: a lambda or function object has no name
int call(const RRef<Counter>& counter) {
  return counter.async<[](Counter& one) { return one.get(); }>().get();
}
#endif
#ifdef FUNCTION_OF_A_COPY  // says: takes the value first, by reference
int count(Counter counter) { return counter.get(); }
int call(const RRef<Counter>& counter) { return counter.sync<&count>(); }
#endif
#ifdef METHOD_OF_PYTORCHS_PROXY  // says: no member named 'rpc_sync'
int call(const RRef<Counter>& counter) { return counter.rpc_sync().add(1); }
#endif
#ifdef WRONG_ARGUMENTS_OF_A_CONSTRUCTOR  // says: no constructor that takes these arguments
RRef<Counter> call(const Agent& agent) {
  return agent.remote<Counter>("worker1", std::vector<int>());
}
#endif
#ifdef TOO_MANY_ARGUMENTS_OF_A_CONSTRUCTOR  // says: no constructor that takes these arguments
int call(const Agent& agent) {
  return agent.remote<Counter>("worker1", 1, 2).sync<&Counter::add>(1);
}
#endif
#ifdef ABSTRACT_CLASS  // says: no constructor that takes these arguments
struct Shape {
  virtual ~Shape() = default;
  virtual double area() const = 0;
};
double call(const Agent& agent) { return agent.remote<Shape>("worker1").sync<&Shape::area>(); }
#endif
#ifdef POINTER_TO_A_CONSTRUCTOR  // says: cannot take a view or a pointer
struct Buffer {
  Buffer(const float* first, int) : number(*first) {}
  float number;
};
void call(const Agent& agent, const float* numbers) { agent.remote<Buffer>("worker1", numbers, 2); }
#endif
#ifdef STRUCT_TO_A_CONSTRUCTOR  // says: WEFT_FIELDS
struct Trainer {
  explicit Trainer(Settings given) : settings(given) {}
  Settings settings;
};
void call(const Agent& agent) { agent.remote<Trainer>("worker1", Settings()); }
#endif
#ifdef FETCHED_WITHOUT_A_COPY  // says: cannot be copied: call a method on it where it is
int call(const RRef<std::unique_ptr<int>>& number) { return *number.to_here(); }
#endif
#ifdef COPIED_WITHOUT_A_COPY  // says: cannot be copied: call a method on it where it is
RRef<std::unique_ptr<double>> call(const RRef<std::unique_ptr<double>>& number) {
  return number.copy_to("worker1");
}
#endif
#ifdef WRONG_VALUE_OF_A_REFERENCE  // says: the value of an RRef<T> is a T
RRef<std::string> call(const Agent& agent) { return RRef<std::string>(agent, 7); }
#endif
#ifdef REFERENCE_TO_ANOTHER_TYPE  // says: could not convert | no viable conversion
RRef<int> call(const Agent& agent) { return agent.remote<&text_of>("worker1", 7); }
#endif

// ---- Futures.

#ifdef CONTINUATION_OF_ANOTHER_TYPE  // says: a continuation takes the Future, or its value
int call(const Agent& agent) {
  return agent.async<&plus>("worker1", 1, 2)
      .then([](const std::string& text) { return text.size(); })
      .get();
}
#endif
#ifdef CONTINUATION_OF_A_VALUE_THAT_IS_NONE  // says: a continuation of a Future<void> takes the
                                             // Future, or nothing
auto call(const Future<void>& done) {
  return done.then([](int value) { return value; });
}
#endif
#ifdef CONTINUATION_WITHOUT_A_PARAMETER  // says: a continuation takes the Future, or its value
int call(const Future<int>& later) {
  return later.then([] { return 1; }).get();
}
#endif
#ifdef CONTINUATION_THAT_IS_NO_FUNCTION  // says: a continuation takes the Future, or its value
auto call(const Future<int>& later) { return later.then(7); }
#endif
#ifdef CONTINUATION_THAT_CHANGES_THE_VALUE  // says: a continuation takes the Future, or its value
void call(const Future<int>& later) {
  later.then([](int& value) { ++value; });
}
#endif
#ifdef LOOK_OF_ANOTHER_TYPE  // says: on_done
void call(const Future<int>& later) {
  later.on_done([](const std::string&) {});
}
#endif
#ifdef FUTURE_OF_ANOTHER_TYPE  // says: could not convert | no viable conversion
Future<int> call(const Agent& agent) { return agent.async<&text_of>("worker1", 7); }
#endif
#ifdef SHARED_FUTURE_OF_WHAT_CANNOT_BE_COPIED  // says: futures share their value, and this value
                                               // cannot be copied
std::unique_ptr<int> make() { return nullptr; }
auto call(const Agent& agent) { return agent.async<&make>("worker1").get(); }
#endif
#ifdef PROMISE_OF_ANOTHER_TYPE  // says: cast from
void call(const weft::Promise<int>& promise) { promise.set("seven"); }
#endif
#ifdef READY_OF_ANOTHER_TYPE  // says: the value of a Future<T> is a T
Future<int> call() { return Future<int>::ready(std::string("seven")); }
#endif

// ---- Calls by name.

#ifdef MAP_TO_AN_OPERATOR  // says: an operator called by name takes
at::Tensor call(const Agent& agent) {
  return agent.sync_op("aten::add", "worker1", std::map<int, int>());
}
#endif
#ifdef STRUCT_TO_A_SCRIPT  // says: a script takes tensors, numbers, strings
at::Tensor call(const Agent& agent) {
  return agent.sync_script("math.scale", "worker1", Settings());
}
#endif
#ifdef STRUCT_OF_A_SCRIPT  // says: a script's result is a tensor, a number
double call(const Agent& agent) {
  return agent.sync_script<Settings>("math.scale", "worker1").rate;
}
#endif
#ifdef EXPOSED_LAMBDA  // says: a lambda or function object has no name
void call() {
  weft::rpc::expose<[](int a) { return a; }>();
}
#endif
#ifdef EXPOSED_STRUCT  // says: WEFT_FIELDS
double rate(Settings settings) { return settings.rate; }
void call() { weft::rpc::expose<&rate>(); }
#endif

// ---- Modules in parallel.

#ifdef IMPL_BY_VALUE  // says: std::make_shared
auto call(const ProcessGroup& group) { return DistributedDataParallel(NetImpl(), group); }
#endif
#ifdef IMPL_AS_VARIABLE  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  NetImpl net;
  DistributedDataParallel ddp(net, group);
  return ddp(x);
}
#endif
#ifdef IMPL_NAMED_BY_VALUE  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  NetImpl net;
  DistributedDataParallel<NetImpl> ddp(net, group);
  return ddp(x);
}
#endif
#ifdef IMPL_BY_POINTER  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  NetImpl net;
  DistributedDataParallel ddp(&net, group);
  return ddp(x);
}
#endif
#ifdef UNIQUE_MODULE  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  DistributedDataParallel ddp(std::make_unique<NetImpl>(), group);
  return ddp(x);
}
#endif
#ifdef HOLDER_AS_TYPE  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const Net& net, const at::Tensor& x) {
  DistributedDataParallel<Net> ddp(net, group);
  return ddp(x);
}
#endif
#ifdef NO_MODULE  // says: std::make_shared
void call(const ProcessGroup& group) {
  DistributedDataParallel ddp(std::make_shared<Counter>(), group);
}
#endif
#ifdef TENSOR_AS_MODULE  // says: std::make_shared
void call(const ProcessGroup& group, const at::Tensor& x) { DistributedDataParallel ddp(x, group); }
#endif
#ifdef PARAMETERS_AS_MODULE  // says: std::make_shared
void call(const ProcessGroup& group, const Net& net) {
  DistributedDataParallel ddp(net->parameters(), group);
}
#endif
#ifdef MODULE_WITHOUT_GROUP  // says: then the group
void call(const Net& net) { DistributedDataParallel ddp(net); }
#endif
#ifdef IMPL_TO_BE_SHARDED  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  NetImpl net;
  FullyShardedDataParallel sharded(net, group);
  return sharded(x);
}
#endif
#ifdef HOLDER_AS_TYPE_TO_BE_SHARDED  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const Net& net, const at::Tensor& x) {
  FullyShardedDataParallel<Net> sharded(net, group);
  return sharded(x);
}
#endif
#ifdef MODULE_TO_BE_SHARDED_WITHOUT_GROUP  // says: then the group
void call(const Net& net) { FullyShardedDataParallel sharded(net); }
#endif
#ifdef WRONG_INPUT  // says: the module's forward() does not take these arguments
at::Tensor call(const ProcessGroup& group, const Net& net) {
  DistributedDataParallel ddp(net, group);
  return ddp("text");
}
#endif
#ifdef NO_INPUT  // says: the module's forward() does not take these arguments
at::Tensor call(const ProcessGroup& group, const Net& net) {
  DistributedDataParallel ddp(net, group);
  return ddp.forward();
}
#endif
#ifdef NO_FORWARD  // says: the module's forward() does not take these arguments
at::Tensor call(const ProcessGroup& group, const std::shared_ptr<torch::nn::Module>& net,
                const at::Tensor& x) {
  DistributedDataParallel ddp(net, group);
  return ddp(x);
}
#endif
#ifdef CHECKPOINTED_WRAPPER  // says: and not a wrapper such as
at::Tensor call(DistributedDataParallel<NetImpl>& ddp, const at::Tensor& x) {
  return weft::checkpointed(ddp, x);
}
#endif
#ifdef CHECKPOINTED_FUNCTION  // says: checkpointed takes a torch::nn module first
at::Tensor call(const at::Tensor& x) {
  return weft::checkpointed([](const at::Tensor& y) { return y; }, x);
}
#endif
#ifdef CHECKPOINTED_WITH_OTHER_INPUT  // says: the module's forward() does not take these arguments
at::Tensor call(const Net& net) { return weft::checkpointed(net, "text"); }
#endif
#ifdef CHECKPOINTED_VIEW  // says: keeps its arguments until backward
struct Summing : torch::nn::Module {
  at::Tensor forward(at::TensorList parts) { return parts[0] + parts[1]; }
};
at::Tensor call(const std::shared_ptr<Summing>& module, const std::vector<at::Tensor>& parts) {
  return weft::checkpointed(module, at::TensorList(parts));
}
#endif
#ifdef CHECKPOINTED_NUMBER  // says: checkpointed takes modules whose forward() returns
struct Counting : torch::nn::Module {
  double forward(const at::Tensor& x) { return static_cast<double>(x.numel()); }
};
double call(const std::shared_ptr<Counting>& module, const at::Tensor& x) {
  return weft::checkpointed(module, x);
}
#endif
#ifdef PARAMETERS_OF_THE_REPLICA  // says: has no member named 'parameters' | no member named
                                  // 'parameters'
auto call(DistributedDataParallel<NetImpl>& ddp) { return ddp.parameters(); }
#endif
#ifdef PARAMETERS_OF_THE_REPLICA_BY_ARROW  // says: non-pointer type | is not a pointer
auto call(DistributedDataParallel<NetImpl>& ddp) { return ddp->parameters(); }
#endif
#ifdef COPY_OF_A_REPLICA  // says: use of deleted function | implicitly-deleted copy constructor
auto call(DistributedDataParallel<NetImpl>& ddp) { return ddp; }
#endif
#ifdef CHECKPOINT_OF_A_REPLICA  // says: (of a DistributedDataParallel: its module())
auto call(DistributedDataParallel<NetImpl>& ddp) { return weft::checkpoint::Part("model", ddp); }
#endif
#ifdef CHECKPOINT_OF_A_STRUCT  // says: a checkpoint's part is a torch::nn module
void call(const ProcessGroup& group, Settings& settings) {
  weft::checkpoint::save("run.pt", group, {{"settings", settings}});
}
#endif
#ifdef SHARDED_WITHOUT_OPTIONS  // says: ZeroRedundancyOptimizer
void call(const ProcessGroup& group, const Net& net) {
  weft::ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(net->parameters(), group);
  optimizer.step();
}
#endif
#ifdef SHARDED_WITH_OTHER_OPTIONS  // says: ZeroRedundancyOptimizer
void call(const ProcessGroup& group, const Net& net) {
  weft::ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(net->parameters(), group, Settings());
  optimizer.step();
}
#endif
#ifdef SHARDED_WITH_THE_OPTIONS_SECOND  // says: ZeroRedundancyOptimizer
void call(const ProcessGroup& group, const Net& net) {
  weft::ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(net->parameters(),
                                                             torch::optim::SGDOptions(0.1), group);
  optimizer.step();
}
#endif
#ifdef SHARDED_NO_OPTIMIZER  // says: ZeroRedundancyOptimizer takes a libtorch optimizer class
void call(const ProcessGroup& group, const Net& net) {
  weft::ZeroRedundancyOptimizer<Counter> optimizer(net->parameters(), group, 0.1);
}
#endif
#ifdef DISTRIBUTED_OPTIMIZER_OF_TENSORS  // says: DistributedOptimizer
void call(const Net& net) {
  weft::DistributedOptimizer<torch::optim::SGD> optimizer(net->parameters(),
                                                          torch::optim::SGDOptions(0.1));
}
#endif
#ifdef DISTRIBUTED_OPTIMIZER_WITH_OTHER_OPTIONS  // says: DistributedOptimizer
void call(const std::vector<RRef<at::Tensor>>& parameters) {
  weft::DistributedOptimizer<torch::optim::SGD> optimizer(parameters, Settings());
}
#endif

// ---- Groups.

#ifdef SUM_WITHOUT_A_GROUP  // says: too few arguments
at::Tensor call(const at::Tensor& x) { return weft::functional::all_reduce(x); }
#endif
#ifdef SUM_BY_NAME  // says: cannot convert 'const char*' to 'weft::ReduceOp' | parameter of type
                    // 'ReduceOp'
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  return weft::functional::all_reduce(x, group, "sum");
}
#endif
#ifdef WORKERS_OPTIONS_BY_POSITION  // says: could not convert '0' | too many arguments to function
                                    // call
void call() { weft::rpc::init("worker0", 0, 2); }
#endif

}  // namespace mistakes
