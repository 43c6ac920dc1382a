// SPDX-License-Identifier: Apache-2.0
// The extension module torch_weft._weft.
#include <torch/csrc/utils/pybind.h>

#include <weft/python/backend/creation.h>
#include <weft/python/backend/errors.h>
#include <weft/python/backend/interpreter.h>

namespace weft::python {

PYBIND11_MODULE(_weft, module) {
  module.doc() = "The backend \"weft\" of torch.distributed";
  // The classes below are derived from torch.distributed's.
  py::module_::import("torch.distributed");
  load_classes();
  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(module, "Backend")
      // Called on ranks that are not in a group which torch.distributed splits off; Weft's groups
      // need nothing of them.
      .def("perform_nocolor_split", [](const Backend&, const py::object&) {});
  module.def("create", &create, py::arg("options"), py::call_guard<py::gil_scoped_release>());
  module.def("set_main_thread", &set_main_thread, py::arg("id"));
  module.def("leave_all", &GroupBackend::leave_all, py::arg("politely"),
             py::call_guard<py::gil_scoped_release>());
  module.def("leave_by_exception", &GroupBackend::leave_by_exception,
             py::call_guard<py::gil_scoped_release>());
  module.def("facts_of", [](const std::string& text) -> std::optional<py::tuple> {
    const auto facts = facts_of(text);
    if (!facts) return std::nullopt;
    return py::make_tuple(facts->ranks, facts->operation);
  });
}

}  // namespace weft::python
