// SPDX-License-Identifier: Apache-2.0
// Mistakes in remote calls of functions. See shared.cc.

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
