# Names and their rules, without a provider: `terraform test` runs this module anywhere.

variable "name" {
  description = "Prefix of everything that is made."
  type        = string
  default     = "tensorferry"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{2,18}[a-z0-9]$", var.name))
    error_message = "The name must have 4 to 20 characters: lower-case letters, digits and hyphens, a letter first."
  }
}

variable "project" {
  description = "Project that runs the jobs."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "The project must be a project ID (6 to 30 lower-case letters, digits and hyphens), not its name."
  }
}

variable "region" {
  description = "Region of bucket and jobs; near the accelerators that read the checkpoints."
  type        = string

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "The region must look like europe-west4; a zone such as europe-west4-a is too narrow."
  }
}

variable "image" {
  description = "The container image, with its tag or digest."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9.-]+/.+(:[^/:]+|@sha256:[0-9a-f]{64})$", var.image)) && !endswith(var.image, ":latest")
    error_message = "The image must carry a tag other than latest, or a digest: a job must run what was tested."
  }
}

locals {
  bucket = "${var.project}-${var.name}"

  # Artifact Registry's images are LOCATION-docker.pkg.dev/PROJECT/REPOSITORY/NAME; any other registry has no entry.
  registry = regexall("^([a-z0-9-]+)-docker[.]pkg[.]dev/([^/]+)/([^/]+)/", var.image)
}

output "repositories" {
  description = "Where the image lies, if that is in Artifact Registry: workers must be let read it."
  value       = { for found in local.registry : found[2] => { location = found[0], project = found[1] } }
}

output "bucket" {
  value = local.bucket
}

output "account_id" {
  value = "${var.name}-worker"
}

output "template_object" {
  value = "templates/${var.name}-convert.json"
}

output "temp_location" {
  value = "gs://${local.bucket}/tmp"
}

output "template" {
  description = "The flex template's container spec."
  value = {
    image   = var.image
    sdkInfo = { language = "PYTHON" }
    defaultEnvironment = {
      tempLocation          = "gs://${local.bucket}/tmp"
      sdkContainerImage     = var.image
      additionalExperiments = ["no_use_multiple_sdk_containers"]
    }
  }
}
