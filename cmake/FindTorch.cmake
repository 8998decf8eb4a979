# Where the installed torch keeps its headers and libraries, asked of torch itself: its own CMake
# package refuses a CUDA build of torch on a machine without the toolkit.
if(NOT PYTHON_EXECUTABLE)
  message(FATAL_ERROR "Pass -DPYTHON_EXECUTABLE=..., the Python whose torch to build for.")
endif()
execute_process(
  COMMAND ${PYTHON_EXECUTABLE} -c
    "import sysconfig, torch.utils.cpp_extension as e, os, torch; print(';'.join(e.include_paths())); print(os.path.join(os.path.dirname(torch.__file__), 'lib')); print(sysconfig.get_paths()['include']); print((torch.version.cuda or '0').split('.')[0])"
  OUTPUT_VARIABLE TORCH_ANSWER RESULT_VARIABLE TORCH_STATUS OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT TORCH_STATUS EQUAL 0)
  message(FATAL_ERROR "${PYTHON_EXECUTABLE} has no torch: pip install 'torch>=2.11,<2.16' first.")
endif()
string(REPLACE "\n" "|" TORCH_ANSWER "${TORCH_ANSWER}")
string(REPLACE ";" "\\;" TORCH_ANSWER "${TORCH_ANSWER}")
string(REPLACE "|" ";" TORCH_ANSWER "${TORCH_ANSWER}")
list(GET TORCH_ANSWER 0 TORCH_INCLUDES)
list(GET TORCH_ANSWER 1 TORCH_LIBRARIES_DIR)
list(GET TORCH_ANSWER 2 PYTHON_INCLUDES)
list(GET TORCH_ANSWER 3 TORCH_CUDA_MAJOR)  # 0: a torch without CUDA
string(REPLACE "\\;" ";" TORCH_INCLUDES "${TORCH_INCLUDES}")
