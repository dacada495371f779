variable "name" {
  description = "Prefix of everything that is made."
  type        = string
  default     = "tensorferry"
}

variable "project" {
  description = "Project that runs the jobs."
  type        = string
}

variable "region" {
  description = "Region of bucket and jobs."
  type        = string
}

variable "image" {
  description = "The container image that deploy/Dockerfile builds, with its tag or digest."
  type        = string
}

variable "source_buckets" {
  description = "Other buckets that checkpoints are read from."
  type        = list(string)
  default     = []
}

variable "launchers" {
  description = "Who may start jobs, such as user:ada@example.com."
  type        = list(string)
  default     = []
}
