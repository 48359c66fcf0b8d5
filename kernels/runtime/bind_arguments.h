// The argument structs of the kernel libraries as Python objects. Included by module.cc alone.
#ifndef KERNELS_RUNTIME_BIND_ARGUMENTS_H_
#define KERNELS_RUNTIME_BIND_ARGUMENTS_H_

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/abi/deepep_internode.h"
#include "kernels/abi/deepep_kernel.h"
#include "kernels/abi/deepep_lowlatency.h"

namespace deepep {

namespace py = pybind11;

// A field of an argument struct; pointers are integers in Python.
struct Field {
  PyObject* name;  // interned, as the keywords of a call are
  size_t offset, bytes;
  bool is_signed;
};

template <class Struct, class Type>
Field field(const char* name, Type Struct::*, size_t offset) {
  static_assert(sizeof(Type) == 4 || sizeof(Type) == 8);
  return {PyUnicode_InternFromString(name), offset, sizeof(Type), std::is_signed_v<Type>};
}

inline void store(char* to, const Field& field, PyObject* value) {
  uint64_t bits = 0;
  if (field.is_signed) {
    const long long number = PyLong_AsLongLong(value);
    bits = static_cast<uint64_t>(number);
    if (field.bytes == 4 && number != static_cast<int32_t>(number)) {
      PyErr_Format(PyExc_OverflowError, "%U is %lld, which does not fit 32 bits", field.name,
                   number);
    }
  } else {
    bits = PyLong_AsUnsignedLongLong(value);
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  std::memcpy(to + field.offset, &bits, field.bytes);  // little-endian, as all of these machines
}

// Every call of an operation passes here, so a name is found by its address first.
inline void store_named(void* to, const std::vector<Field>& fields, PyObject* name,
                        PyObject* value) {
  auto found = std::find_if(fields.begin(), fields.end(),
                            [name](const Field& field) { return field.name == name; });
  if (found == fields.end()) {
    found = std::find_if(fields.begin(), fields.end(), [name](const Field& field) {
      return PyUnicode_Compare(field.name, name) == 0;
    });
  }
  if (found == fields.end()) {
    throw py::type_error("no field is called " + py::str(name).cast<std::string>());
  }
  store(static_cast<char*>(to), *found, value);
}

inline void store_all(void* to, const std::vector<Field>& fields, const py::kwargs& values) {
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t at = 0;
  while (PyDict_Next(values.ptr(), &at, &name, &value) != 0) store_named(to, fields, name, value);
}

// An argument struct, made and changed with its fields as keywords; those never named are 0.
template <class Struct>
void bind_struct(py::module_& m, const char* name, const std::vector<Field>& fields) {
  py::class_<Struct>(m, name)
      .def(py::init([fields](const py::kwargs& values) {
        Struct args{};
        args.struct_size = sizeof(Struct);
        store_all(&args, fields, values);
        return args;
      }))
      .def("set",
           [fields](Struct& self, const py::kwargs& values) { store_all(&self, fields, values); })
      .def("__setattr__", [fields](Struct& self, const py::str& name, const py::object& value) {
        store_named(&self, fields, name.ptr(), value.ptr());
      });
}

#define FIELD(name) field(#name, &Struct::name, offsetof(Struct, name))

inline void bind_arguments(py::module_& m) {
  {
    using Struct = DeepEpLayoutArgs;
    bind_struct<Struct>(
        m, "LayoutArgs",
        {FIELD(num_blocks), FIELD(stream), FIELD(num_ranks), FIELD(num_experts), FIELD(num_tokens),
         FIELD(num_topk), FIELD(idx_bytes), FIELD(topk_idx), FIELD(num_tokens_per_rank),
         FIELD(num_tokens_per_expert), FIELD(is_token_in_rank), FIELD(scratch)});
  }
  {
    using Struct = DeepEpNotifyArgs;
    bind_struct<Struct>(
        m, "NotifyArgs",
        {FIELD(num_blocks), FIELD(stream), FIELD(num_tokens), FIELD(num_experts),
         FIELD(num_tokens_per_rank), FIELD(num_tokens_per_expert), FIELD(is_token_in_rank),
         FIELD(rank_prefix), FIELD(send_row), FIELD(num_recv_per_expert), FIELD(ticket)});
  }
  {
    using Struct = DeepEpDispatchArgs;
    bind_struct<Struct>(m, "DispatchArgs",
                        {FIELD(num_blocks),
                         FIELD(stream),
                         FIELD(num_tokens),
                         FIELD(hidden),
                         FIELD(num_scales),
                         FIELD(num_topk),
                         FIELD(num_experts),
                         FIELD(idx_bytes),
                         FIELD(x),
                         FIELD(x_scales),
                         FIELD(scale_token_stride),
                         FIELD(scale_group_stride),
                         FIELD(topk_idx),
                         FIELD(topk_weights),
                         FIELD(send_row),
                         FIELD(rank_prefix),
                         FIELD(recv_capacity),
                         FIELD(fill_tail),
                         FIELD(recv_x),
                         FIELD(recv_x_scales),
                         FIELD(recv_topk_idx),
                         FIELD(recv_topk_weights),
                         FIELD(recv_src_idx)});
  }
  {
    using Struct = DeepEpCombineArgs;
    bind_struct<Struct>(
        m, "CombineArgs",
        {FIELD(num_blocks), FIELD(stream), FIELD(num_tokens), FIELD(num_recv), FIELD(hidden),
         FIELD(num_topk), FIELD(x), FIELD(x_exported), FIELD(topk_weights),
         FIELD(topk_weights_exported), FIELD(bias_0), FIELD(bias_1), FIELD(send_row),
         FIELD(combined_x), FIELD(combined_topk_weights)});
  }
  {
    using Struct = DeepEpLowLatencyDispatchArgs;
    bind_struct<Struct>(m, "LowLatencyDispatchArgs",
                        {FIELD(num_blocks),
                         FIELD(stream),
                         FIELD(phases),
                         FIELD(direct),
                         FIELD(cast),
                         FIELD(num_tokens),
                         FIELD(max_tokens),
                         FIELD(hidden),
                         FIELD(num_scales),
                         FIELD(num_topk),
                         FIELD(num_experts),
                         FIELD(idx_bytes),
                         FIELD(x),
                         FIELD(x_scales),
                         FIELD(scale_token_stride),
                         FIELD(scale_group_stride),
                         FIELD(topk_idx),
                         FIELD(mask),
                         FIELD(send_index),
                         FIELD(send_counts),
                         FIELD(recv_x),
                         FIELD(recv_scales),
                         FIELD(recv_source),
                         FIELD(recv_count),
                         FIELD(layout_range),
                         FIELD(recv_stats),
                         FIELD(wait_stats)});
  }
  {
    using Struct = DeepEpLowLatencyCombineArgs;
    bind_struct<Struct>(
        m, "LowLatencyCombineArgs",
        {FIELD(num_blocks), FIELD(stream), FIELD(phases), FIELD(use_logfmt), FIELD(num_tokens),
         FIELD(max_tokens), FIELD(hidden), FIELD(num_topk), FIELD(num_experts), FIELD(idx_bytes),
         FIELD(x), FIELD(topk_idx), FIELD(topk_weights), FIELD(send_index), FIELD(recv_source),
         FIELD(layout_range), FIELD(mask), FIELD(out), FIELD(wait_stats)});
  }
  {
    using Struct = DeepEpInternodeLayoutArgs;
    bind_struct<Struct>(m, "InternodeLayoutArgs",
                        {FIELD(num_blocks), FIELD(stream), FIELD(num_nodes), FIELD(ranks_per_node),
                         FIELD(num_experts), FIELD(num_tokens), FIELD(num_topk), FIELD(idx_bytes),
                         FIELD(topk_idx), FIELD(num_tokens_per_rank), FIELD(num_tokens_per_node),
                         FIELD(num_tokens_per_expert), FIELD(is_token_in_rank), FIELD(scratch)});
  }
  {
    using Struct = DeepEpInternodeNotifyArgs;
    bind_struct<Struct>(
        m, "InternodeNotifyArgs",
        {FIELD(num_blocks), FIELD(stream), FIELD(num_tokens), FIELD(num_experts),
         FIELD(num_tokens_per_rank), FIELD(num_tokens_per_node), FIELD(num_tokens_per_expert),
         FIELD(is_token_in_rank), FIELD(recv_prefix), FIELD(send_row), FIELD(node_row),
         FIELD(forward_first), FIELD(forward_prefix), FIELD(num_recv_per_expert), FIELD(ticket)});
  }
  {
    using Struct = DeepEpInternodeDispatchArgs;
    bind_struct<Struct>(m, "InternodeDispatchArgs",
                        {FIELD(num_blocks),
                         FIELD(stream),
                         FIELD(num_tokens),
                         FIELD(hidden),
                         FIELD(num_scales),
                         FIELD(num_topk),
                         FIELD(num_experts),
                         FIELD(idx_bytes),
                         FIELD(x),
                         FIELD(x_scales),
                         FIELD(scale_token_stride),
                         FIELD(scale_group_stride),
                         FIELD(topk_idx),
                         FIELD(topk_weights),
                         FIELD(recv_prefix),
                         FIELD(send_row),
                         FIELD(node_row),
                         FIELD(forward_first),
                         FIELD(forward_prefix),
                         FIELD(recv_capacity),
                         FIELD(forward_capacity),
                         FIELD(forward_row),
                         FIELD(forward_token),
                         FIELD(fill_tail),
                         FIELD(recv_x),
                         FIELD(recv_x_scales),
                         FIELD(recv_topk_idx),
                         FIELD(recv_topk_weights),
                         FIELD(recv_src_idx)});
  }
  {
    using Struct = DeepEpInternodeCombineArgs;
    bind_struct<Struct>(
        m, "InternodeCombineArgs",
        {FIELD(num_blocks), FIELD(stream), FIELD(num_tokens), FIELD(num_recv), FIELD(hidden),
         FIELD(num_topk), FIELD(x), FIELD(x_exported), FIELD(topk_weights),
         FIELD(topk_weights_exported), FIELD(bias_0), FIELD(bias_1), FIELD(send_row),
         FIELD(node_row), FIELD(forward_prefix), FIELD(forward_row), FIELD(forward_token),
         FIELD(combined_x), FIELD(combined_topk_weights)});
  }
}

#undef FIELD

}  // namespace deepep

#endif  // KERNELS_RUNTIME_BIND_ARGUMENTS_H_
